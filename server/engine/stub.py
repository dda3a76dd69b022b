"""The stub engine core: vLLM's wire protocol, words at a set rate, no model.

It stands where vLLM's EngineCore process stands and speaks its protocol (vllm/v1/engine/core.py,
`process_input_sockets`), so all of the gateway, `AsyncLLM` included, runs as with a real model: tests and
measurements of the gateway use the same code as production. Steps are the engine's: at each tick every
running stream gets one token, and each client gets one message.
"""

import contextlib
import itertools
import math
import signal
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import setproctitle
import zmq
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from server.engine.stub_model import EOS_ID, FIRST_WORD_ID, NUM_WORDS
from server.sections import StubSettings

PROCESS_NAME = "stub-engine-core"
IDENTITY = (0).to_bytes(2, "little")  # data-parallel rank 0, as EngineCore names itself


@dataclass(slots=True)
class Stream:
    """One running request."""

    request: EngineCoreRequest
    seed: int
    due_at: float
    limit: int
    natural_end: int
    num_tokens: int = 0

    def next_token(self) -> tuple[int, FinishReason | None]:
        """The next token id; it depends on the prompt and the position alone, so twins are equal."""
        position = self.num_tokens
        self.num_tokens += 1
        if self.num_tokens > self.natural_end:
            return EOS_ID, FinishReason.STOP
        finish = FinishReason.LENGTH if self.num_tokens >= self.limit else None
        mixed = ((self.seed + position * 0x9E3779B1) & 0xFFFFFFFF) >> 8  # Knuth's multiplicative hash
        return FIRST_WORD_ID + mixed % NUM_WORDS, finish


class StubCore:
    """State of the stub: its sockets and its running streams."""

    def __init__(self, inputs: list[str], outputs: list[str], settings: StubSettings) -> None:
        self._settings = settings
        self._period_s = 1.0 / settings.tokens_per_s
        self._streams: dict[str, Stream] = {}
        self._encoder = MsgpackEncoder()
        self._add_decoder = MsgpackDecoder(EngineCoreRequest)
        self._decoder = MsgpackDecoder()
        self._steps = itertools.count()
        context = zmq.Context()
        self._poller = zmq.Poller()
        self._outputs = []
        for address in inputs:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, IDENTITY)
            socket.connect(address)
            socket.send(b"")  # the ready frame; empty: the client keeps its own figures
            self._poller.register(socket, zmq.POLLIN)
        for address in outputs:
            socket = context.socket(zmq.PUSH)
            socket.connect(address)
            self._outputs.append(socket)

    def serve(self) -> None:
        """Runs until the process is ended."""
        next_step = time.monotonic()
        while True:
            now = time.monotonic()
            if self._streams and now >= next_step:
                self._step(now)
                # A step that comes late does not pull the following ones together.
                next_step = max(next_step + self._period_s, now)
            until_step_ms = math.ceil((next_step - time.monotonic()) * 1000)
            wait_ms = max(0, until_step_ms) if self._streams else None
            for socket, _ in self._poller.poll(wait_ms):
                self._receive(socket)
            if not self._streams:
                next_step = time.monotonic()

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                kind, *frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            kind = EngineCoreRequestType(bytes(kind.buffer))
            if kind is EngineCoreRequestType.ADD:
                self._add(self._add_decoder.decode(frames))
            elif kind is EngineCoreRequestType.ABORT:
                for request_id in self._decoder.decode(frames):
                    self._streams.pop(request_id, None)
                # As in EngineCore, steps without outputs tell client 0 alone.
                self._send(0, EngineCoreOutputs(scheduler_stats=self._stats(time.monotonic())))
            elif kind is EngineCoreRequestType.UTILITY:
                self._answer_utility(*self._decoder.decode(frames))

    def _add(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params or SamplingParams()
        prompt = request.prompt_token_ids or []
        adapter = request.lora_request
        minimum = max(self._settings.output_tokens, params.min_tokens)
        self._streams[request.request_id] = Stream(
            request=request,
            seed=zlib.crc32(f"{prompt}{adapter.lora_name if adapter else ''}".encode()),
            due_at=time.monotonic() + self._settings.ttft_ms / 1000,
            limit=params.max_tokens or 1,
            natural_end=2**62 if params.ignore_eos else minimum,
        )

    def _step(self, now: float) -> None:
        per_client: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        due = [stream for stream in self._streams.values() if stream.due_at <= now]
        for stream in due:
            per_client[stream.request.client_index].append(self._output(stream, now))
        stats = self._stats(now)
        for client, outputs in per_client.items():
            self._send(client, EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=now))

    def _stats(self, now: float) -> SchedulerStats:
        waiting = sum(stream.due_at > now for stream in self._streams.values())
        return SchedulerStats(
            num_running_reqs=len(self._streams) - waiting,
            num_waiting_reqs=waiting,
            step_counter=next(self._steps),
        )

    def _output(self, stream: Stream, now: float) -> EngineCoreOutput:
        first = stream.num_tokens == 0
        token, finish = stream.next_token()
        output = EngineCoreOutput(stream.request.request_id, [token], finish_reason=finish)
        output.new_logprobs = _logprobs(token, stream.request.sampling_params)
        if first:
            arrived = stream.due_at - self._settings.ttft_ms / 1000
            output.events = [
                EngineCoreEvent.new_event(EngineCoreEventType.QUEUED, arrived),
                EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED, arrived),
            ]
            length = len(stream.request.prompt_token_ids or [])
            output.prefill_stats = PrefillStats(num_prompt_tokens=length, num_computed_tokens=length)
        if finish is not None:
            del self._streams[stream.request.request_id]
        return output

    def _answer_utility(self, client: int, call_id: int, method: str, _args: Any) -> None:
        answer = UtilityOutput(call_id)
        if method == "get_supported_tasks":
            answer.result = UtilityResult(["generate"])
        elif method == "add_lora":
            answer.result = UtilityResult(True)
        else:
            answer.failure_message = f"the stub engine has no {method}"
        self._send(client, EngineCoreOutputs(utility_output=answer))

    def _send(self, client: int, outputs: EngineCoreOutputs) -> None:
        self._outputs[client].send_multipart(self._encoder.encode(outputs))


def _logprobs(token: int, params: SamplingParams | None) -> LogprobsLists | None:
    """The stub knows what it says next: log-probability 0 for the token, next to nothing for others."""
    if params is None or params.logprobs is None:
        return None
    others = [word for word in range(FIRST_WORD_ID, FIRST_WORD_ID + NUM_WORDS) if word != token]
    ids = [token, token, *others][: params.logprobs + 1]
    values = np.full((1, len(ids)), -100.0, dtype=np.float32)
    values[0, :2] = 0.0
    return LogprobsLists(np.array([ids], dtype=np.int32), values, np.array([1], dtype=np.int32))


def run(inputs: list[str], outputs: list[str], settings: StubSettings) -> None:
    """Entry point of the stub's process: one ZMQ address of each kind for every client slot."""
    setproctitle.setproctitle(PROCESS_NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    time.sleep(settings.start_delay_s)
    with contextlib.suppress(msgspec.DecodeError):  # a message it can't read ends it, like EngineCore's
        StubCore(inputs, outputs, settings).serve()
