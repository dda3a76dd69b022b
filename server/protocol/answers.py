"""What vLLM's serving classes answer: as JSON, as SSE events, and errors in OpenAI's words."""

import http
import re
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from server.errors import ApiError, internal_error, unavailable
from server.streaming import StreamBroken

VLLM_SUFFIX = re.compile(r" \((parameter|value)=.*\)$", re.DOTALL)
"""vLLM's errors end in `(parameter=..., value=...)`: the first is OpenAI's `param`, the second the input."""
FULL_CONTEXT = re.compile(r"max_tokens must be at least 1, got -?\d+")
"""vLLM's words for a prompt of exactly the context length: what clients send was checked before."""
ERROR_EVENT = 'data: {"error"'
FIELD_NAME = re.compile(r"[a-z_]+")

ENGINE_ERRORS = (EngineDeadError, EngineGenerateError, VLLMError, ValueError, TypeError, OverflowError)

Events = AsyncGenerator[bytes, None]
Answer = bytes | Events
"""A JSON body, or whole SSE events."""


async def result_of(work: Coroutine[Any, Any, Any]) -> Any:
    """What a serving class returned; its errors, returned or raised, are raised as ApiError."""
    try:
        result = await work
    except ValidationError as error:  # of a request that the serving class itself made of the client's
        raise validation_error(error) from None
    except TimeoutError:
        raise unavailable("The prompt could not be rendered in time.") from None
    except ENGINE_ERRORS as error:
        raise as_api_error(error) from error
    if isinstance(result, ErrorResponse):
        raise api_error(result)
    return result


async def events_of(chunks: AsyncGenerator[str | bytes, None]) -> AsyncGenerator[bytes, None]:
    """vLLM's SSE events as bytes; its error event becomes StreamBroken, since [DONE] would follow it."""
    try:
        async for chunk in chunks:
            if isinstance(chunk, bytes):  # the lean path's
                yield chunk
                continue
            if chunk.startswith(ERROR_EVENT):
                raise StreamBroken(streamed_error(chunk))
            yield chunk.encode()
    except ENGINE_ERRORS as error:
        raise StreamBroken(as_api_error(error)) from error
    finally:
        await chunks.aclose()


def streamed_error(chunk: str) -> ApiError:
    """The error in one of vLLM's SSE events."""
    return api_error(ErrorResponse.model_validate_json(chunk.removeprefix("data: ").strip()))


def as_api_error(error: Exception) -> ApiError:
    """An exception of the engine or a serving class (ENGINE_ERRORS) in OpenAI's words."""
    cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
    if isinstance(cause, EngineDeadError):
        return unavailable("The engine has stopped; the request was not completed.")
    return api_error(create_error_response(cause))


def api_error(response: ErrorResponse) -> ApiError:
    """vLLM's error in OpenAI's words."""
    error = response.error
    error.message = VLLM_SUFFIX.sub("", error.message)
    status = int(error.code)
    if status >= 500 and status != http.HTTPStatus.SERVICE_UNAVAILABLE:
        if "EngineCore encountered" in error.message or "EngineDead" in error.message:
            return unavailable("The engine has stopped; the request was not completed.")
        return internal_error()
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        return unavailable(error.message)
    if status == http.HTTPStatus.NOT_FOUND:
        return ApiError(404, error.message, code="model_not_found", param=error.param)
    if FULL_CONTEXT.match(error.message):
        message = "The prompt fills the model's maximum context length: no token is left for an answer."
        return ApiError(400, message, code="context_length_exceeded")
    too_long = error.param == "input_tokens" or "context length" in error.message
    code = "context_length_exceeded" if too_long else None
    return ApiError(status, error.message, code=code, param=None if too_long else error.param)


def validation_error(error: ValidationError) -> ApiError:
    """The first fault, worded without quoting the input."""
    first = error.errors(include_input=False, include_url=False)[0]
    # A union adds the names of its members to the path; fields and indices are the client's own.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or FIELD_NAME.fullmatch(part)]
    param = ".".join(path) or None
    message = first["msg"].removeprefix("Value error, ").removesuffix(".")
    return ApiError(400, f"{param}: {message}." if param else f"{message}.", param=param)


def json_of(model: BaseModel, **options: Any) -> bytes:
    """The model as JSON; `options` as pydantic's model_dump_json."""
    return model.model_dump_json(**options).encode()
