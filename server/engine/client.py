"""What the gateway asks of an engine: start, stop, state, and `llm`, which generates.

One class for both kinds of core (vLLM's, the stub's): they differ only in the process that `EngineCore`
starts.
"""

import asyncio
import contextlib
import enum
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog
import vllm.envs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from server.config import Settings
from server.context import RequestContext
from server.engine import build
from server.engine.core import EngineCore, EngineStartError
from server.engine.llm import TrackedLLM
from server.engine.pace import OutputPace
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


class Engine:
    """The engine and its life: configured in the constructor, started and stopped by the gateway."""

    def __init__(
        self,
        settings: Settings,
        on_gap: Callable[[float, int], None],
        on_lag: Callable[[float], None] = lambda _lag_s: None,
    ) -> None:
        """Checks the model and the engine's settings; loads nothing. Raises SettingsError.

        `on_gap(gap_s, num_tokens)` is called for each later output of a stream, `on_lag(lag_s)` for each
        step of the engine with the time from its end to our work on it.
        """
        self.settings = settings
        self._on_gap = on_gap
        self._pace = OutputPace(settings.gateway.coalesce_max_delay_ms / 1000, on_lag)
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
            # What is here now stays: no collection need go over all of vLLM again.
            gc.collect()
            gc.freeze()
            self.state = EngineState.READY

    def _start_blocking(self) -> TrackedLLM:
        addresses = self._core.start()
        try:
            return TrackedLLM(
                on_gap=self._on_gap,
                pace=self._pace,
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
        gc.unfreeze()  # or vLLM's objects end with the interpreter, in no order
        if self._folder is not None:
            self._folder.cleanup()
