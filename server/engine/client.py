"""What a gateway worker asks of an engine: attach, state, and `llm`, which generates.

One class for both kinds of core (vLLM's, the stub's): the worker sees no difference.
"""

import asyncio
import enum
import gc
from collections.abc import Callable
from typing import Any

import vllm.envs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from server.config import Settings
from server.context import RequestContext
from server.engine import build, rendering
from server.engine.core import EngineStartError
from server.engine.grammar import GrammarChecker
from server.engine.llm import TrackedLLM
from server.engine.pace import OutputPace
from server.engine.selfcheck import run_self_check
from server.engine.table import RequestTable


class EngineState(enum.StrEnum):
    """Where the engine stands; requests are served in READY alone."""

    STARTING = "starting"
    CHECKING = "checking"
    READY = "ready"
    FAILED = "failed"
    """It never served: it did not start, or the self-check found wrong numbers."""
    DEAD = "dead"
    """It served, and its process ended."""


class Engine:
    """A gateway worker's view of the engine: attached to a running core, lost with it, attached to the next.

    The core is started, watched and ended by the supervisor (server/engine/host.py).
    """

    def __init__(
        self,
        settings: Settings,
        config: Any,
        on_gap: Callable[[float, int], None],
        on_lag: Callable[[float], None] = lambda _lag_s: None,
        table: Any = None,
        grammars: GrammarChecker | None = None,
    ) -> None:
        """`config` is vLLM's (build.vllm_config).

        `on_gap(gap_s, num_tokens)` is called for each later output of a stream, `on_lag(lag_s)` for each
        step of the engine with the time from its end to our work on it. `table` is the shared memory of a
        RequestTable; None: nobody has to know this worker's requests. `grammars` tries grammars apart.
        """
        self.settings = settings
        self._config = config
        self._on_gap = on_gap
        self._pace = OutputPace(settings.gateway.coalesce_max_delay_ms / 1000, on_lag)
        self._table = table
        self._grammars = grammars
        self.state = EngineState.STARTING
        self.reason: str | None = None
        """Why the engine does not serve, for people; None in READY."""
        self.llm: TrackedLLM | None = None

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self.state is EngineState.READY

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step of the engine."""
        return int(self._config.scheduler_config.max_num_seqs)

    async def attach(self, addresses: dict[str, Any], index: int = 0, count: int = 1) -> TrackedLLM:
        """Becomes client `index` of `count` of the core behind `addresses`. Raises EngineStartError."""
        self.close()
        self.state = EngineState.CHECKING
        self.llm = llm = await asyncio.to_thread(self._attach_blocking, addresses, index, count)
        if self._table is not None:
            llm.output_processor.request_states = RequestTable(self._table)
        rendering.tame(llm.renderer)
        # vLLM asks the environment for each token otherwise (its engine core does the same).
        vllm.envs.enable_envs_cache()
        return llm

    def _attach_blocking(self, addresses: dict[str, Any], index: int, count: int) -> TrackedLLM:
        config = build.client_config(self._config)
        try:
            return TrackedLLM(
                on_gap=self._on_gap,
                pace=self._pace,
                grammars=self._grammars,
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
                log_requests=False,
                client_addresses=addresses,
                client_count=count,
                client_index=index,
            )
        except (TimeoutError, RuntimeError, OSError) as error:
            raise EngineStartError(f"no connection to the engine core: {error}") from error

    async def check(self) -> None:
        """Checks the core's numbers; raises SelfCheckError, or EngineStartError when it ends meanwhile."""
        assert self.llm is not None
        if self.settings.engine.kind == "vllm" and self.settings.selfcheck.enabled:
            try:
                await run_self_check(self.llm, self.settings)
            except EngineDeadError as error:
                raise EngineStartError("the engine ended while it was checked") from error

    def become_ready(self) -> None:
        """Requests can be served from now on; no effect on an engine that has ended meanwhile."""
        if self.state is EngineState.CHECKING:
            # What is here now stays: no collection need go over all of vLLM again.
            gc.collect()
            gc.freeze()
            self.state = EngineState.READY
            self.reason = None

    def lost(self, reason: str, *, failed: bool = False) -> None:
        """The core is gone (or unusable: `failed`). All open requests fail at once.

        A client of a core that it did not start hears nothing of its death and would wait for ever.
        """
        self.state = EngineState.FAILED if failed else EngineState.DEAD
        self.reason = reason
        self.fail_requests()

    def fail_requests(self) -> None:
        """Ends all open requests with an error; no further one is taken."""
        if self.llm is not None:
            self.llm.engine_core.resources.engine_dead = True
            self.llm.engine_core.outputs_queue.put_nowait(EngineDeadError())

    def track(self, ctx: RequestContext) -> None:
        """From now on, tokens of engine requests named after `ctx.id` are noted on `ctx`."""
        if self.llm is not None:
            self.llm.contexts[ctx.id] = ctx

    def close(self) -> None:
        """Lets go of the core; harmless when there is none."""
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None
            gc.unfreeze()  # or it would be kept for ever
