"""vLLM's AsyncLLM and nothing else, over a stub core of its own, in a process of its own."""

import asyncio
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.open_loop import FailedError, Schedule, prompt, timed
from server.config import Settings
from server.engine import build
from server.engine.core import EngineCore
from server.engine.stub_model import write_stub_model

START_LIMIT_S = 120.0
RUN_LIMIT_S = 300.0


class BareClient:
    """The other end of the process that holds the client."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self, schedule: Schedule) -> list[float | None]:
        """As open_loop.timed, for prompts given as token ids. Raises FailedError when the process is gone."""
        self._pipe.send(schedule)
        return self._receive(RUN_LIMIT_S)

    def wait_ready(self) -> None:
        """Returns once the client serves."""
        self._receive(START_LIMIT_S)

    def _receive(self, limit_s: float) -> Any:
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except EOFError:
            pass
        raise FailedError("the bare engine client has ended or does not answer")


@contextmanager
def bare_client(settings: Settings, input_words: int, output_tokens: int) -> Iterator[BareClient]:
    """Starts the process over a stub core with `settings.stub`; ends it when the block is left."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, settings, input_words, output_tokens))
    process.start()
    theirs.close()
    client = BareClient(ours)
    try:
        client.wait_ready()
        yield client
    finally:
        ours.close()  # tells it to end
        process.join(20)
        process.kill()


def _run(pipe: Connection, settings: Settings, input_words: int, output_tokens: int) -> None:
    build.prepare_environment(settings)
    with tempfile.TemporaryDirectory() as folder:
        config = build.vllm_config(settings, str(write_stub_model(Path(folder), settings.stub.max_model_len)))
        core = EngineCore(settings, config)
        try:
            (addresses,) = core.start(1)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(pipe, config, addresses, input_words, output_tokens))
        finally:
            core.stop()


async def _serve(
    pipe: Connection, config: Any, addresses: dict[str, Any], input_words: int, output_tokens: int
) -> None:
    llm = await asyncio.to_thread(_attach, build.client_config(config), addresses)
    try:
        await _first_token(llm, [1], output_tokens, "warm-up")
        # As the gateway does, so that it is not the collector's pauses that are compared.
        gc.collect()
        gc.freeze()
        pipe.send("ready")
        while True:
            schedule: Schedule = await asyncio.to_thread(pipe.recv)
            pipe.send(await _timed(llm, schedule, input_words, output_tokens))
    except EOFError:
        return
    finally:
        llm.shutdown()


def _attach(config: Any, addresses: dict[str, Any]) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        log_requests=False,
        client_addresses=addresses,
    )


async def _timed(llm: Any, schedule: Schedule, input_words: int, output_tokens: int) -> list[float | None]:
    """Prompts become token ids before the first request is due."""
    tokenizer = llm.get_tokenizer()
    first = schedule.first_number
    ids = {
        number: tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt(number, input_words)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for number in range(first, first + len(schedule.due_s))
    }
    return await timed(
        schedule, lambda number: _first_token(llm, ids[number], output_tokens, f"bare-{number}")
    )


async def _first_token(llm: Any, token_ids: list[int], output_tokens: int, request_id: str) -> float:
    """One request to its end; when its first token came."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=output_tokens, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA
    )
    first_at: float | None = None
    async for output in llm.generate({"prompt_token_ids": token_ids}, params, request_id):
        if first_at is None and output.outputs[0].token_ids:
            first_at = time.perf_counter()
    if first_at is None:
        raise FailedError
    return first_at
