"""What a gateway worker asks of an engine: attach, state, and `llm`, which generates.

One class for both kinds of core (vLLM's, the stub's): the worker sees no difference. `TrackedLLM` is
vLLM's AsyncLLM, with token times noted on the request they belong to.
"""

import asyncio
import copy
import enum
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import anyio
import vllm.envs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from server.config import Settings
from server.context import RequestContext
from server.engine.core import EngineStartError
from server.engine.selfcheck import run_self_check
from server.engine.sink import TokenSink
from server.engine.table import RequestTable
from server.engine.times import TokenTimes


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
    """A gateway worker's view of the engine: attached to a running core, lost with it, attached to the next.

    The core is started, watched and ended by the supervisor (server/engine/host.py).
    """

    def __init__(
        self, settings: Settings, config: Any, on_gap: Callable[[float, int], None], table: Any = None
    ) -> None:
        """`config` is vLLM's (build.vllm_config).

        `on_gap(gap_s, num_tokens)` is called for each later output of a stream. `table` is the shared
        memory of a RequestTable; None: nobody has to know this worker's requests.
        """
        self.settings = settings
        self._config = config
        self._on_gap = on_gap
        self._table = table
        self.state = EngineState.STARTING
        self.reason: str | None = None
        """Why the engine does not serve, for people; None in READY."""
        self.llm: TrackedLLM | None = None

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self.state is EngineState.READY

    async def attach(self, addresses: dict[str, Any], index: int = 0, count: int = 1) -> TrackedLLM:
        """Becomes client `index` of `count` of the core behind `addresses`. Raises EngineStartError."""
        self.close()
        self.state = EngineState.CHECKING
        self.llm = llm = await asyncio.to_thread(self._attach_blocking, addresses, index, count)
        if self._table is not None:
            llm.output_processor.request_states = RequestTable(self._table)
        # vLLM asks the environment for each token otherwise (its engine core does the same).
        vllm.envs.enable_envs_cache()
        return llm

    def _attach_blocking(self, addresses: dict[str, Any], index: int, count: int) -> TrackedLLM:
        config = copy.copy(self._config)
        config.cache_config = copy.copy(config.cache_config)  # the core's figures are added to it
        try:
            return TrackedLLM(
                on_gap=self._on_gap,
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
        """Checks the core's numbers; raises SelfCheckError, or EngineDeadError when it ends meanwhile."""
        assert self.llm is not None
        if self.settings.engine.kind == "vllm" and self.settings.selfcheck.enabled:
            await run_self_check(self.llm, self.settings)

    def become_ready(self) -> None:
        """Requests can be served from now on; no effect on an engine that has ended meanwhile."""
        if self.state is EngineState.CHECKING:
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
