"""What the gateway asks of an engine: start, stop, state, and `llm`, which generates.

One class for both kinds of core (vLLM's, the stub's): they differ only in the process that `EngineCore`
starts. `TrackedLLM` is vLLM's AsyncLLM, with token times noted on the request they belong to.
"""

import asyncio
import contextlib
import enum
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import anyio
import structlog
import vllm.envs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from server.config import Settings
from server.context import RequestContext
from server.engine import build
from server.engine.core import EngineCore, EngineStartError
from server.engine.selfcheck import SelfCheckError, run_self_check
from server.engine.sink import TokenSink
from server.engine.stub_model import write_stub_model
from server.engine.times import TokenTimes

log = structlog.get_logger()


class EngineState(enum.StrEnum):
    """Where the engine stands; requests are served in READY alone."""

    STARTING = "starting"
    CHECKING = "checking"
    READY = "ready"
    FAILED = "failed"
    """It never served: it did not start, or the self-check found wrong numbers."""
    DEAD = "dead"
    """It served, and its process ended."""
    STOPPED = "stopped"


class TrackedLLM(AsyncLLM):
    """AsyncLLM that tells each request's context when its tokens came, and knows the lean way.

    The serving classes name engine requests `<kind>-<id>` or `<kind>-<id>-<n>`, with the id we gave
    (`RequestContext.id`), which is how an output finds its context.
    """

    def __init__(self, *, on_gap: Callable[[float, int], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.contexts: WeakValueDictionary[str, RequestContext] = WeakValueDictionary()
        self._on_gap = on_gap

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> "AsyncGenerator[RequestOutput, None] | LeanRequest":
        """As AsyncLLM.generate; for a context marked `lean`, the request not yet sent (LeanRequest)."""
        ctx = self.contexts.get(request_id.split("-", 2)[1]) if "-" in request_id else None
        if ctx is None:
            return super().generate(prompt, sampling_params, request_id, **kwargs)
        streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        times = TokenTimes(ctx, self._on_gap, streamed=streamed)
        if ctx.lean:
            return LeanRequest(self, prompt, sampling_params, request_id, kwargs, TokenSink(times))
        return _noting(super().generate(prompt, sampling_params, request_id, **kwargs), times)


async def _noting(
    outputs: AsyncGenerator[RequestOutput, None], times: TokenTimes
) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs, noted. Leaving early closes `outputs`, which aborts the request in the engine."""
    first = True
    async with aclosing(outputs):
        async for output in outputs:
            now = time.monotonic()
            if first:
                times.prompt(len(output.prompt_token_ids or ()))
                first = False
            for choice in output.outputs:
                if num_new := len(choice.token_ids):
                    times.tokens(choice.index, num_new, now)
            if output.finished:
                times.finish(output.metrics)
            yield output


@dataclass
class LeanRequest:
    """A request of one choice of plain text, on its way to a TokenSink instead of a generator."""

    llm: TrackedLLM
    prompt: Any
    params: SamplingParams
    request_id: str
    options: dict[str, Any]
    sink: TokenSink
    internal_id: str | None = None

    async def send(self) -> TokenSink:
        """Hands the request to the engine, as AsyncLLM.add_request does for one choice."""
        llm, options = self.llm, self.options
        if llm.errored:
            raise EngineDeadError
        request = llm.input_processor.process_inputs(
            self.request_id,
            self.prompt,
            self.params,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=options.get("lora_request"),
            priority=options.get("priority", 0),
        )
        request.reasoning_ended = options.get("reasoning_ended")
        llm.input_processor.assign_request_id(request)
        llm._run_output_handler()
        llm.check_admission(request_id=request.request_id)
        self.internal_id = request.request_id
        llm.output_processor.add_request(request, None, None, 0, self.sink)
        self.sink.attach(llm.output_processor.request_states[request.request_id])
        try:
            await llm.engine_core.add_request_async(request)
        except BaseException:
            await self.abort()
            raise
        return self.sink

    async def abort(self) -> None:
        """Ends the request in the engine; harmless when it has ended or was never sent."""
        if self.internal_id is not None and self.internal_id in self.llm.output_processor.request_states:
            with anyio.CancelScope(shield=True):
                await self.llm.abort(self.internal_id, internal=True)


class Engine:
    """The engine and its life: configured in the constructor, started and stopped by the gateway."""

    def __init__(self, settings: Settings, on_gap: Callable[[float, int], None]) -> None:
        """Checks the model and the engine's settings; loads nothing. Raises SettingsError.

        `on_gap(gap_s, num_tokens)` is called for each later output of a stream.
        """
        self.settings = settings
        self._on_gap = on_gap
        self.state = EngineState.STARTING
        self.reason: str | None = None
        """Why the engine does not serve, for people; None in READY."""
        self.llm: TrackedLLM | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.config = build.vllm_config(settings, self._model())
        self._core = EngineCore(settings, self.config)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _model(self) -> str:
        if self.settings.engine.kind == "vllm":
            return build.resolve_model(self.settings)
        self._folder = tempfile.TemporaryDirectory(prefix="lapilli-stub-")
        return str(write_stub_model(Path(self._folder.name), self.settings.stub.max_model_len))

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self.state is EngineState.READY

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the engine core."""
        return self._core.pids

    async def start(self) -> TrackedLLM:
        """Starts the core and checks its numbers; `become_ready` is next.

        Raises EngineStartError or SelfCheckError; `reason` says why, too.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self.llm = await asyncio.to_thread(self._start_blocking)
            self._core.watch(self._died_in_thread)
            # vLLM asks the environment for each token otherwise (its engine core does the same).
            vllm.envs.enable_envs_cache()
            self.state = EngineState.CHECKING
            if self.settings.engine.kind == "vllm" and self.settings.selfcheck.enabled:
                await run_self_check(self.llm, self.settings)
        except (EngineStartError, SelfCheckError) as error:
            self._fail(str(error))
            raise
        except EngineDeadError:
            self._fail("the engine core ended during the self-check")
            raise EngineStartError(self.reason) from None
        return self.llm

    def become_ready(self) -> None:
        """Requests can be served from now on; no effect on an engine that has ended meanwhile."""
        if self.state is EngineState.CHECKING:
            self.state = EngineState.READY

    def _start_blocking(self) -> TrackedLLM:
        addresses = self._core.start()
        try:
            return TrackedLLM(
                on_gap=self._on_gap,
                vllm_config=self.config,
                executor_class=Executor.get_class(self.config),
                log_stats=True,
                log_requests=False,
                client_addresses=addresses,
            )
        except (TimeoutError, RuntimeError, OSError) as error:
            self._core.stop()
            raise EngineStartError(f"no connection to the engine core: {error}") from error

    def _fail(self, reason: str) -> None:
        self.state = EngineState.FAILED
        self.reason = reason

    def _died_in_thread(self, reason: str) -> None:
        if self._loop is not None:
            # RuntimeError: the loop is closed, the server is gone, nobody waits for this news.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._died, reason)

    def _died(self, reason: str) -> None:
        """Fails all open requests: a shared client of a dead core hears nothing and would wait for ever."""
        log.error("engine_died", reason=reason)
        self.state = EngineState.DEAD
        self.reason = reason
        if self.llm is not None:
            self.llm.engine_core.resources.engine_dead = True
            self.llm.engine_core.outputs_queue.put_nowait(EngineDeadError())

    def track(self, ctx: RequestContext) -> None:
        """From now on, tokens of engine requests named after `ctx.id` are noted on `ctx`."""
        if self.llm is not None:
            self.llm.contexts[ctx.id] = ctx

    async def stop(self) -> None:
        """Ends the core and its client. Open requests are aborted."""
        if self.state in (EngineState.READY, EngineState.CHECKING, EngineState.STARTING):
            self.state = EngineState.STOPPED
            self.reason = "the server is shutting down"
        await asyncio.to_thread(self._core.stop)
        if self.llm is not None:
            self.llm.shutdown()
        if self._folder is not None:
            self._folder.cleanup()
