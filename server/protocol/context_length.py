"""A prompt and the answer that is asked for must fit the model's context; neither is cut to make it fit.

vLLM would give fewer tokens than were asked for (vllm/entrypoints/serve/utils/api_utils.py, get_max_tokens).
"""

from collections.abc import Sequence
from typing import Any

from server.errors import ApiError

OUTPUT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def output_field(request: Any) -> str:
    """The field that says how many output tokens a choice may have; of two, the one that vLLM obeys."""
    names = [name for name in OUTPUT_FIELDS if hasattr(request, name)]
    return next((name for name in names if getattr(request, name) is not None), names[0])


def check_context_length(serving: Any, request: Any, engine_inputs: Sequence[Any]) -> None:
    """Raises ApiError (400) where a rendered prompt leaves less room than the request asks for.

    `serving` is a vLLM serving class, `request` its request model. Where no number of output tokens is
    asked for, or 0 (an echo), one must fit: the engine always makes one.
    """
    limit = serving.model_config.max_model_len
    field = output_field(request)
    asked = max(1, getattr(request, field) or 1) if field in request.model_fields_set else 1
    for engine_input in engine_inputs:
        length = serving._extract_prompt_len(engine_input)
        if length + asked > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{length + asked} tokens ({length} in the prompt, {asked} for the answer)."
            )
            raise ApiError(400, message, code="context_length_exceeded")
