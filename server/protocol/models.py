"""The models that are served: the base model and its LoRA adapters."""

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList

from server.context import RequestContext
from server.protocol.answers import json_of
from server.protocol.parts import unknown_model


class Models:
    """Answers of /v1/models."""

    def __init__(self, models: OpenAIServingModels) -> None:
        self._models = models

    async def list(self, ctx: RequestContext) -> bytes:
        """All models that the service offers, the base model first."""
        return json_of(await self._cards(ctx))

    async def one(self, name: str, ctx: RequestContext) -> bytes:
        """The model `name`. Raises ApiError (404)."""
        for card in (await self._cards(ctx)).data:
            if card.id == name:
                return json_of(card)
        raise unknown_model()

    async def _cards(self, ctx: RequestContext) -> ModelList:
        cards = await self._models.show_available_models()
        if ctx.service is not None and ctx.service.model is not None:
            cards.data = [card for card in cards.data if card.id == ctx.service.model]
        for card in cards.data:
            card.root = card.id  # vLLM puts an adapter's folder on this machine there
        return cards
