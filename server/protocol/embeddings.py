"""Embeddings, where the served model makes them."""

from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.renderers.chat_utils import ChatTemplateConfig

from server.context import RequestContext
from server.protocol.answers import result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts, unsupported_endpoint


class Embeddings:
    """Answers of /v1/embeddings."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._serving: ServingEmbedding | None = None
        if not parts.generates:
            template = ChatTemplateConfig(chat_template=parts.renderer.chat_template)
            self._serving = ServingEmbedding(
                parts.llm, parts.models, request_logger=None, chat_template_config=template
            )

    async def create(self, body: bytes, ctx: RequestContext) -> bytes:
        """The vectors of one or several inputs. Raises ApiError, 404 for a model that makes none."""
        if self._serving is None or "embed" not in await self._parts.llm.get_supported_tasks():
            raise unsupported_endpoint("does not make embeddings")
        fields = self._parts.served(self._parts.validator.embeddings(body)) | {"request_id": ctx.id}
        model = EmbeddingChatRequest if fields.get("messages") is not None else EmbeddingCompletionRequest
        response = await result_of(self._serving(parse(model, fields)))
        return bytes(response.body)
