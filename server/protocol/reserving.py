"""What vLLM's serving classes have rendered must fit the context and its limits before the engine sees it."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from server.context import RequestContext
from server.limits import take_tokens, too_long_output
from server.protocol.context_length import check_context_length, output_field


async def reserve_tokens(
    serving: Any, request: Any, engine_inputs: Sequence[Any], ctx: RequestContext | None
) -> None:
    """Reserves the worst case of all prompts and choices; raises ApiError where a limit refuses it.

    Nothing is reserved for a request that does not fit the model's context: that is an ApiError too.
    A request that does not say how long its answer may be is held to what its limits could ever allow; one
    that asks for more than its tenant may have is refused. `serving` is a vLLM serving class, `request` its
    request model (changed in place), `ctx` None for what is not a client's.
    """
    check_context_length(serving, request, engine_inputs)
    if ctx is None or ctx.reservation is None:
        return
    plan = ctx.reservation.plan
    lengths = [serving._extract_prompt_len(engine_input) for engine_input in engine_inputs]
    choices = getattr(request, "n", None) or 1
    field = output_field(request)
    asked = getattr(request, field)
    if field in request.model_fields_set and asked is not None:
        if plan.max_output_tokens is not None and asked > plan.max_output_tokens:
            raise too_long_output(field, asked, plan.max_output_tokens)
    else:
        most = _allowed(plan.max_output_tokens, plan.most_tokens, sum(lengths), choices * len(lengths))
        if most is not None and (asked is None or asked > most):
            asked = most
            setattr(request, field, most)
    outputs = [
        get_max_tokens(
            serving.model_config.max_model_len,
            asked,
            length,
            serving.default_sampling_params,
            serving.override_max_tokens,
        )
        for length in lengths
    ]
    await take_tokens(ctx, sum(lengths), choices * sum(outputs), max(outputs, default=0))


def _allowed(cap: int | None, most_tokens: int | None, prompt_tokens: int, outputs: int) -> int | None:
    """Most tokens of each output that the limits could ever allow, at least 1; None: any number."""
    if most_tokens is None:
        return cap
    rest = max(1, (most_tokens - prompt_tokens) // max(1, outputs))
    return rest if cap is None else min(cap, rest)


class ReservingCompletion(OpenAIServingCompletion):
    """OpenAIServingCompletion that reserves tokens before it generates."""

    async def render_completion_request(self, request: Any) -> Any:
        """As vLLM's; raises ApiError where a limit refuses."""
        result = await super().render_completion_request(request)
        if not isinstance(result, ErrorResponse):
            await reserve_tokens(self, request, result, self.engine_client.contexts.get(request.request_id))
        return result
