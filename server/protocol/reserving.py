"""Tokens are reserved where vLLM's serving classes have rendered a request, before the engine sees it."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from server.context import RequestContext
from server.limits import take_tokens, too_long_output

OUTPUT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


async def reserve_tokens(
    serving: Any, request: Any, engine_inputs: Sequence[Any], ctx: RequestContext | None
) -> None:
    """Reserves the worst case of all prompts and choices; raises ApiError where a limit refuses it.

    A request that does not say how long its answer may be is held to what its limits could ever allow; one
    that asks for more than its tenant may have is refused. `serving` is a vLLM serving class, `request` its
    request model (changed in place), `ctx` None for what is not a client's.
    """
    if ctx is None or ctx.reservation is None:
        return
    plan = ctx.reservation.plan
    lengths = [serving._extract_prompt_len(engine_input) for engine_input in engine_inputs]
    choices = getattr(request, "n", None) or 1
    field = _output_field(request)
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


def _output_field(request: Any) -> str:
    """The field that says how many output tokens a choice may have; of two, the one that vLLM obeys."""
    names = [name for name in OUTPUT_FIELDS if hasattr(request, name)]
    return next((name for name in names if getattr(request, name) is not None), names[0])


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
