"""What the gateway asks of an engine: start, stop, state, and `llm`, which generates.

One class for both kinds of core (vLLM's, the stub's): they differ only in the process that `EngineCore`
starts. `TrackedLLM` is vLLM's AsyncLLM, with token times noted on the request they belong to.
"""

import asyncio
import contextlib
import enum
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog
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
from server.engine.stub_model import write_stub_model

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
    """AsyncLLM that tells each request's context when its tokens came.

    The serving classes name engine requests `<kind>-<id>` or `<kind>-<id>-<n>`, with the id we gave
    (`RequestContext.id`), which is how an output finds its context.
    """

    def __init__(self, *, on_gap: Callable[[float, int], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.contexts: WeakValueDictionary[str, RequestContext] = WeakValueDictionary()
        self._on_gap = on_gap

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate. Leaving the generator early aborts the request in the engine."""
        ctx = self.contexts.get(request_id.split("-", 2)[1]) if "-" in request_id else None
        async with aclosing(super().generate(prompt, sampling_params, request_id, **kwargs)) as outputs:
            if ctx is None:
                async for output in outputs:
                    yield output
                return
            note = TokenTimes(ctx, self._on_gap, sampling_params.output_kind)
            async for output in outputs:
                note(output)
                yield output


class TokenTimes:
    """Notes the token times of one engine request on its context."""

    def __init__(
        self, ctx: RequestContext, on_gap: Callable[[float, int], None], kind: RequestOutputKind
    ) -> None:
        self._ctx = ctx
        self._on_gap = on_gap
        self._streamed = kind is RequestOutputKind.DELTA
        self._prompt_counted = False
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = defaultdict(int)

    def __call__(self, output: RequestOutput) -> None:
        """Takes one output of the engine: a delta of a stream, or the whole answer."""
        ctx = self._ctx
        now = time.monotonic()
        for choice in output.outputs:
            if num_new := len(choice.token_ids):
                self._count(choice.index, num_new, now)
        if not self._prompt_counted:
            self._prompt_counted = True
            ctx.prompt_tokens += len(output.prompt_token_ids or ())
        if output.finished and output.metrics is not None:
            self._engine_times(output.metrics)

    def _count(self, index: int, num_new: int, now: float) -> None:
        ctx = self._ctx
        ctx.completion_tokens += num_new
        self._tokens[index] += num_new
        ctx.longest_choice_tokens = max(ctx.longest_choice_tokens, self._tokens[index])
        if not self._streamed:
            return
        if ctx.first_token_at is None:
            ctx.first_token_at = now
        ctx.last_token_at = now
        if index in self._last:
            self._on_gap(now - self._last[index], num_new)
        self._last[index] = now

    def _engine_times(self, times: Any) -> None:
        """The engine's own timestamps: monotonic, and of this host's clock (vllm/v1/metrics/stats.py)."""
        ctx = self._ctx
        if not times.scheduled_ts or not times.first_token_ts:
            return
        ctx.queue_s = max(0.0, times.scheduled_ts - times.queued_ts)
        ctx.prefill_s = times.first_token_ts - times.scheduled_ts
        ctx.decode_s = times.last_token_ts - times.first_token_ts
        if not self._streamed:
            # A non-stream answer shows up once, at its end: when its tokens came, the engine knows.
            ctx.first_token_at = min(ctx.first_token_at or times.first_token_ts, times.first_token_ts)
            ctx.last_token_at = max(ctx.last_token_at or 0.0, times.last_token_ts)


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
