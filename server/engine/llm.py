"""vLLM's AsyncLLM, with token times noted on the request they belong to, and the lean way."""

import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import anyio
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from server.context import RequestContext
from server.engine.grammar import GrammarChecker
from server.engine.pace import OutputPace
from server.engine.sink import TokenSink
from server.engine.stats import BatchedStatLogger
from server.engine.times import TokenTimes

CONTEXT_ID = re.compile(r"[0-9a-f]{32}")


class TrackedLLM(AsyncLLM):
    """AsyncLLM that tells each request's context when its tokens came, and knows the lean way.

    The serving classes name engine requests after the id we gave (`RequestContext.id`), with a kind before it
    and a number after it (`cmpl-<id>-0`, `resp_<id>_0`), which is how an output finds its context.
    """

    def __init__(
        self,
        *,
        on_gap: Callable[[float, int], None],
        pace: OutputPace,
        grammars: GrammarChecker | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(stat_loggers=[BatchedStatLogger], **kwargs)
        self.grammars = grammars
        """Tries grammars before they are sent; None: vLLM checks them, on the event loop."""
        if grammars is not None:
            self.input_processor.structured_outputs_config = None  # leaves its own check out
        self.contexts: WeakValueDictionary[str, RequestContext] = WeakValueDictionary()
        self._on_gap = on_gap
        self._pace = pace

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> "AsyncGenerator[RequestOutput, None] | LeanRequest":
        """As AsyncLLM.generate; for a context marked `lean`, the request not yet sent (LeanRequest)."""
        ctx = self._context(request_id)
        if ctx is None:
            outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
            return self._checked(outputs, sampling_params)
        ctx.model = self._model_name(kwargs)
        prompt = _salted(prompt, ctx)
        kwargs["priority"] = ctx.priority
        streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        times = TokenTimes(ctx, self._on_gap, streamed=streamed)
        if ctx.lean:
            sink = TokenSink(ctx, times, self._pace)
            return LeanRequest(self, prompt, sampling_params, request_id, kwargs, sink)
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        return _noting(self._checked(outputs, sampling_params), times)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Raises GrammarRefused for a grammar that the engine must not get."""
        if self.grammars is not None and params.structured_outputs is not None:
            await self.grammars.check(params.structured_outputs)

    def _checked(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """`outputs`, which send the request at their first step, after a check of its grammar."""
        if self.grammars is None or params.structured_outputs is None:
            return outputs
        return self._after_check(outputs, params)

    async def _after_check(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(outputs):
            await self.check_grammar(params)
            async for output in outputs:
                yield output

    def _model_name(self, options: dict[str, Any]) -> str:
        """The name of what answers: an adapter's, or the model's."""
        lora = options.get("lora_request")
        return str(lora.lora_name if lora is not None else self.model_config.served_model_name)

    def _context(self, request_id: str) -> RequestContext | None:
        named = CONTEXT_ID.search(request_id)
        return self.contexts.get(named.group()) if named else None

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """As AsyncLLM.encode, noted; leaving early aborts (vLLM's aborts on a cancel alone)."""
        ctx, finished = self._context(request_id), False
        if ctx is not None:
            prompt = _salted(prompt, ctx)
            kwargs["priority"] = ctx.priority
        try:
            async with aclosing(super().encode(prompt, pooling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    finished = output.finished
                    if ctx is not None:
                        ctx.model = self._model_name(kwargs)
                        ctx.prompt_tokens += len(output.prompt_token_ids)
                    yield output
        finally:
            if not finished:
                with anyio.CancelScope(shield=True):
                    await self.abort(request_id)


def _salted(prompt: Any, ctx: RequestContext) -> Any:
    """The prompt with the caller's salt: no other tenant's request hits what it leaves in the cache.

    Here and not in the bodies: whatever route a request came by, it comes by here.
    """
    salt = ctx.principal.cache_salt if ctx.principal is not None else ""
    return {**prompt, "cache_salt": salt} if salt else prompt


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
        await llm.check_grammar(self.params)
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
