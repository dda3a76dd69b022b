"""Chat and text completions by vLLM's request models and serving classes.

The serving classes get no HTTP request: their headers
could set priority, data-parallel rank, session and engine request id (vllm/entrypoints/generate/base/
serving.py), and none of these is the client's to choose.
"""

import http
import re
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from server.config import Settings
from server.context import RequestContext
from server.errors import ApiError, internal_error, unavailable
from server.protocol.lean import LeanServingChat
from server.streaming import StreamBroken
from server.validation import ModelLimits, Validator

VLLM_SUFFIX = re.compile(r" \((parameter|value)=.*\)$", re.DOTALL)
"""vLLM's errors end in `(parameter=..., value=...)`: the first is OpenAI's `param`, the second the input."""
ERROR_EVENT = 'data: {"error"'
FIELD_NAME = re.compile(r"[a-z_]+")
ENGINE_ERRORS = (EngineDeadError, EngineGenerateError, VLLMError, ValueError, TypeError, OverflowError)

RequestT = TypeVar("RequestT", ChatCompletionRequest, CompletionRequest)
Answer = bytes | AsyncGenerator[bytes, None]


class OpenAIProtocol:
    """Chat and text completions over one engine client (`AsyncLLM`)."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        name = settings.engine.public_model_name
        self.lean = True
        """Whether plain streams take the lean path; off, all take vLLM's (the reference in tests)."""
        self._models = OpenAIServingModels(llm, [BaseModelPath(name, name)])
        renderer = OnlineRenderer(
            llm.model_config,
            llm.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        self._chat = LeanServingChat(
            llm,
            self._models,
            "assistant",
            online_renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        self._completion = OpenAIServingCompletion(
            llm, self._models, online_renderer=renderer, request_logger=None
        )
        self._renderer = renderer
        self.validator = Validator(ModelLimits.of(llm.model_config, llm.renderer, settings.requests))

    def warm_up(self) -> None:
        """Renders one prompt, so that the first request does not pay for compiling the chat template."""
        self._renderer.warmup()

    async def models(self) -> bytes:
        """The body of `GET /v1/models`."""
        return _json(await self._models.show_available_models())

    async def chat(self, body: bytes, ctx: RequestContext) -> Answer:
        """Serves one chat completion: the JSON body, or a generator of SSE events. Raises ApiError."""
        request = _parse(ChatCompletionRequest, self.validator.chat(body), ctx)
        ctx.lean = self.lean and self._chat.is_plain(request)
        return await _serve(self._chat.create_chat_completion, request)

    async def completion(self, body: bytes, ctx: RequestContext) -> Answer:
        """Serves one text completion, as `chat`."""
        request = _parse(CompletionRequest, self.validator.completion(body), ctx)
        return await _serve(self._completion.create_completion, request)


def _parse(model: type[RequestT], fields: dict[str, Any], ctx: RequestContext) -> RequestT:
    """The body as vLLM's request model, with the engine's request id set to the context's."""
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        request = model.model_validate(known | {"request_id": ctx.id})
    except ValidationError as error:
        raise _validation_error(error) from None
    except (VLLMError, ValueError) as error:
        raise _api_error(create_error_response(error)) from None
    except (TypeError, AttributeError, KeyError, IndexError):
        # vLLM's checks that run before pydantic's own stumble over shapes they do not expect.
        raise ApiError(400, "A field of the request has the wrong shape.") from None
    ctx.stream = bool(request.stream)
    return request


def _validation_error(error: ValidationError) -> ApiError:
    """The first fault, worded without quoting the input."""
    first = error.errors(include_input=False, include_url=False)[0]
    # A union adds the names of its members to the path; fields and indices are the client's own.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or FIELD_NAME.fullmatch(part)]
    param = ".".join(path) or None
    message = first["msg"].removeprefix("Value error, ").removesuffix(".")
    return ApiError(400, f"{param}: {message}." if param else f"{message}.", param=param)


async def _serve(create: Any, request: Any) -> Answer:
    try:
        result = await create(request, None)
    except ENGINE_ERRORS as error:
        raise _exception(error) from error
    if isinstance(result, ErrorResponse):
        raise _api_error(result)
    if isinstance(result, BaseModel):
        return _json(result)
    return _events(result)


async def _events(chunks: AsyncGenerator[str | bytes, None]) -> AsyncGenerator[bytes, None]:
    """vLLM's SSE events as bytes; its error event becomes StreamBroken, since [DONE] would follow it."""
    try:
        async for chunk in chunks:
            if isinstance(chunk, bytes):  # the lean path's
                yield chunk
                continue
            if chunk.startswith(ERROR_EVENT):
                raise StreamBroken(_streamed_error(chunk))
            yield chunk.encode()
    except ENGINE_ERRORS as error:
        raise StreamBroken(_exception(error)) from error
    finally:
        await chunks.aclose()


def _streamed_error(chunk: str) -> ApiError:
    return _api_error(ErrorResponse.model_validate_json(chunk.removeprefix("data: ").strip()))


def _exception(error: Exception) -> ApiError:
    cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
    if isinstance(cause, EngineDeadError):
        return unavailable("The engine has stopped; the request was not completed.")
    return _api_error(create_error_response(cause))


def _api_error(response: ErrorResponse) -> ApiError:
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
    too_long = error.param == "input_tokens" or "context length" in error.message
    code = "context_length_exceeded" if too_long else None
    return ApiError(status, error.message, code=code, param=None if too_long else error.param)


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json().encode()
