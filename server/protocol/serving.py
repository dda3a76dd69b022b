"""The protocols over one engine client, by vLLM's request models and serving classes.

The serving classes get no HTTP request: their headers could set priority, data-parallel rank, session and
engine request id (vllm/entrypoints/generate/base/serving.py), and none of these is the client's to choose.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from server.config import Settings
from server.context import RequestContext
from server.protocol.answers import Answer, events_of, json_of, result_of
from server.protocol.bodies import parse
from server.protocol.lean import LeanServingChat
from server.protocol.messages import Messages
from server.protocol.models import Models
from server.protocol.parts import make_parts
from server.protocol.reserving import ReservingCompletion
from server.protocol.responses import Responses
from server.protocol.tokens import Tokens

RequestT = TypeVar("RequestT", ChatCompletionRequest, CompletionRequest)


class OpenAIProtocol:
    """Everything that is answered from one engine client (`AsyncLLM`); chat and text completions itself."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        self.lean = True
        """Whether plain streams take the lean path; off, all take vLLM's (the reference in tests)."""
        name = settings.engine.public_model_name
        adapters = [
            LoRAModulePath(adapter, str(Path(folder).expanduser().resolve()))
            for adapter, folder in settings.engine.lora_adapters.items()
        ]
        served = OpenAIServingModels(llm, [BaseModelPath(name, name)], lora_modules=adapters)
        parts = make_parts(llm, served, settings.requests)
        self._parts = parts
        self._chat = LeanServingChat(llm, parts.models, "assistant", **parts.chat_options)
        self._completion = ReservingCompletion(
            llm, parts.models, online_renderer=parts.renderer, request_logger=None
        )
        self.models = Models(parts.models)
        self.tokens = Tokens(parts)
        self.messages = Messages(parts, self._chat)
        self.responses = Responses(parts, settings.gateway)

    async def load_adapters(self) -> None:
        """Loads the LoRA adapters into the engine. Raises ValueError."""
        await self._parts.models.init_static_loras()

    def warm_up(self) -> None:
        """Renders one prompt, so that the first request does not pay for compiling the chat template."""
        self._parts.renderer.warmup()

    async def chat(self, body: bytes, ctx: RequestContext) -> Answer:
        """Serves one chat completion: the JSON body, or a generator of SSE events. Raises ApiError."""
        fields = self._parts.served(self._parts.validator.chat(body), ctx)
        request = _parse(ChatCompletionRequest, fields, ctx)
        ctx.lean = self.lean and self._chat.is_plain(request)
        return _answer(await result_of(self._chat.create_chat_completion(request)))

    async def completion(self, body: bytes, ctx: RequestContext) -> Answer:
        """Serves one text completion, as `chat`."""
        fields = self._parts.served(self._parts.validator.completion(body), ctx)
        request = _parse(CompletionRequest, fields, ctx)
        return _answer(await result_of(self._completion.create_completion(request)))


def _parse(model: type[RequestT], fields: dict[str, Any], ctx: RequestContext) -> RequestT:
    """The body as vLLM's request model, with the engine's request id set to the context's."""
    request = parse(model, fields | {"request_id": ctx.id})
    ctx.stream = bool(request.stream)
    return request


def _answer(result: BaseModel | AsyncGenerator[str | bytes, None]) -> Answer:
    return json_of(result) if isinstance(result, BaseModel) else events_of(result)
