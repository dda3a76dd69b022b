"""Tokens are reserved where vLLM's serving classes have rendered a request, before the engine sees it."""

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from server.context import RequestContext
from server.limits import take_tokens, too_long_output


async def reserve_tokens(
    serving: Any, request: Any, engine_inputs: Sequence[Any], ctx: RequestContext
) -> None:
    """Reserves the worst case of all prompts and choices; raises ApiError where a limit refuses it.

    A request that names no `max_tokens` is held to what its limits allow; one that names too many is refused.
    `serving` is a vLLM serving class, `request` its request model (changed in place).
    """
    reservation = ctx.reservation
    if reservation is None:
        return
    lengths = [serving._extract_prompt_len(engine_input) for engine_input in engine_inputs]
    choices = getattr(request, "n", None) or 1
    asked = getattr(request, "max_completion_tokens", None)
    name = "max_tokens" if asked is None else "max_completion_tokens"
    asked = request.max_tokens if asked is None else asked
    cap = reservation.plan.max_output_tokens
    if cap is not None and asked is not None and name in request.model_fields_set and asked > cap:
        raise too_long_output(name, asked, cap)
    if asked is None or name not in request.model_fields_set:
        cap = _allowed(cap, reservation.plan.most_tokens, sum(lengths), choices * len(lengths))
        if cap is not None and (asked is None or asked > cap):
            asked = cap
            setattr(request, name, cap)
    most = [
        get_max_tokens(
            serving.model_config.max_model_len,
            asked,
            length,
            serving.default_sampling_params,
            serving.override_max_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )
        for length in lengths
    ]
    await take_tokens(ctx, sum(lengths), choices * sum(most), max(most, default=0))


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
        ctx = self.engine_client.contexts.get(request.request_id)
        if ctx is not None and not isinstance(result, ErrorResponse):
            await reserve_tokens(self, request, result, ctx)
        return result
