"""Embeddings, where the served model makes them."""

from typing import Any

from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.renderers.chat_utils import ChatTemplateConfig

from server.context import RequestContext
from server.limits import take_tokens
from server.protocol.answers import result_of
from server.protocol.bodies import parse
from server.protocol.parts import Parts, unsupported_endpoint


class ReservingEmbedding(ServingEmbedding):
    """ServingEmbedding that reserves the tokens of all inputs before the engine sees one."""

    async def _prepare_generators(self, ctx: Any) -> None:
        caller = self.engine_client.contexts.get(ctx.request.request_id)
        if caller is not None and caller.reservation is not None:
            lengths = [self._extract_prompt_len(item["prompts"]) for item in ctx.engine_inputs or ()]
            await take_tokens(caller, sum(lengths), 0, 0)
        await super()._prepare_generators(ctx)


class Embeddings:
    """Answers of /v1/embeddings."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._serving: ServingEmbedding | None = None
        if not parts.generates:
            template = ChatTemplateConfig(chat_template=parts.renderer.chat_template)
            self._serving = ReservingEmbedding(
                parts.llm, parts.models, request_logger=None, chat_template_config=template
            )

    async def create(self, body: bytes, ctx: RequestContext) -> bytes:
        """The vectors of one or several inputs. Raises ApiError, 404 for a model that makes none."""
        if self._serving is None or "embed" not in await self._parts.llm.get_supported_tasks():
            raise unsupported_endpoint("does not make embeddings")
        fields = self._parts.served(self._parts.validator.embeddings(body), ctx) | {"request_id": ctx.id}
        model = EmbeddingChatRequest if fields.get("messages") is not None else EmbeddingCompletionRequest
        response = await result_of(self._serving(parse(model, fields)))
        return bytes(response.body)
