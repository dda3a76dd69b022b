"""Text to token ids and back: /tokenize and /detokenize."""

from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from server.context import RequestContext
from server.protocol.answers import json_of, result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts


class Tokens:
    """Answers of /tokenize and /detokenize."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        options = parts.chat_options
        self._serving = ServingTokenization(parts.models, options.pop("online_renderer"), **options)

    async def tokenize(self, body: bytes, ctx: RequestContext) -> bytes:
        """The token ids of a `prompt`, or of `messages` in the chat template. Raises ApiError."""
        fields = self._parts.served(self._parts.validator.tokenize(body), ctx)
        model = TokenizeChatRequest if fields.get("messages") is not None else TokenizeCompletionRequest
        return json_of(await result_of(self._serving.create_tokenize(parse(model, fields), None)))

    async def detokenize(self, body: bytes, ctx: RequestContext) -> bytes:
        """The text of `tokens`. Raises ApiError."""
        fields = self._parts.served(self._parts.validator.detokenize(body), ctx)
        request = parse(DetokenizeRequest, fields)
        return json_of(await result_of(self._serving.create_detokenize(request, None)))
