"""Text to token ids and back: /tokenize and /detokenize."""

from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from server.errors import ApiError
from server.protocol.answers import json_of, result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts


class Tokens:
    """Answers of /tokenize and /detokenize."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        options = parts.chat_options
        self._serving = ServingTokenization(parts.models, options.pop("online_renderer"), **options)

    async def tokenize(self, body: bytes) -> bytes:
        """The token ids of a `prompt`, or of `messages` in the chat template. Raises ApiError."""
        fields = self._parts.read(body)
        model = TokenizeChatRequest if "messages" in fields else TokenizeCompletionRequest
        return json_of(await result_of(self._serving.create_tokenize(parse(model, fields), None)))

    async def detokenize(self, body: bytes) -> bytes:
        """The text of `tokens`. Raises ApiError."""
        request = parse(DetokenizeRequest, self._parts.read(body))
        num_tokens = self._serving.renderer.get_tokenizer().max_token_id + 1
        if any(token >= num_tokens for token in request.tokens):
            raise ApiError(400, f"'tokens' must be below {num_tokens}.", param="tokens")
        return json_of(await result_of(self._serving.create_detokenize(request, None)))
