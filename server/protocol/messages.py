"""Anthropic's Messages API, by vLLM's translation of it into chat completions."""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from server.context import RequestContext
from server.protocol.answers import Answer, events_of, json_of, result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts
from server.streaming import StreamBroken

CHAT_PREFIX, PREFIX = "chatcmpl-", "msg_"


class ServingMessages(AnthropicServingMessages):
    """vLLM's class with all generation done by our chat, and its errors told as they are."""

    def __init__(self, parts: Parts, chat: OpenAIServingChat) -> None:
        super().__init__(parts.llm, parts.models, "assistant", **parts.chat_options)
        self._chat = chat

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | Any:
        """As the chat's; `raw_request` is the request's context, which names it in the engine."""
        request.request_id = raw_request.id
        return await self._chat.create_chat_completion(request)

    def messages_full_converter(self, generator: ChatCompletionResponse) -> AnthropicMessagesResponse:
        """As vLLM's, which stumbles over tool calls that the token limit has cut."""
        message = generator.choices[0].message
        message.tool_calls = [call for call in message.tool_calls if _whole(call.function.arguments)]
        return super().messages_full_converter(generator)

    async def message_stream_converter(
        self, generator: AsyncGenerator[str | bytes, None]
    ) -> AsyncGenerator[str, None]:
        """As vLLM's, but raises what breaks the chat's stream (it would tell the client `str(error)`)."""
        broken: StreamBroken | None = None

        async def chunks() -> AsyncGenerator[str, None]:
            nonlocal broken
            try:
                async for chunk in source:
                    yield chunk.decode()
            except StreamBroken as error:
                broken = error

        source, whole = events_of(generator), chunks()
        try:
            async for event in super().message_stream_converter(whole):
                if broken is None:
                    yield event
            if broken is not None:
                raise broken
        finally:
            await whole.aclose()
            await source.aclose()


def _whole(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


class Messages:
    """Answers of /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, parts: Parts, chat: OpenAIServingChat) -> None:
        self._parts = parts
        self._serving = ServingMessages(parts, chat)

    async def create(self, body: bytes, ctx: RequestContext) -> Answer:
        """Serves one message: the JSON body, or a generator of SSE events. Raises ApiError."""
        fields = self._parts.served(self._parts.validator.messages(body), ctx)
        request = parse(AnthropicMessagesRequest, fields)
        ctx.stream = bool(request.stream)
        result = await result_of(self._serving.create_messages(request, ctx))
        if isinstance(result, AnthropicMessagesResponse):
            result.id = PREFIX + ctx.id
            return json_of(result, exclude_none=True)
        return _events(result)

    async def count_tokens(self, body: bytes, ctx: RequestContext) -> bytes:
        """The number of input tokens the message would have. Raises ApiError."""
        fields = self._parts.served(self._parts.validator.messages(body), ctx)
        request = parse(AnthropicCountTokensRequest, fields)
        return json_of(await result_of(self._serving.count_tokens(request)), exclude_none=True)


async def _events(events: AsyncGenerator[str, None]) -> AsyncGenerator[bytes, None]:
    """The events as bytes; the first one carries the message's id."""
    first = True
    try:
        async for event in events:
            yield (event.replace(CHAT_PREFIX, PREFIX, 1) if first else event).encode()
            first = False
    finally:
        await events.aclose()
