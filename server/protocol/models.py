"""The models that are served: the base model and its LoRA adapters."""

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelList

from server.protocol.answers import json_of
from server.protocol.parts import unknown_model


class Models:
    """Answers of /v1/models."""

    def __init__(self, models: OpenAIServingModels) -> None:
        self._models = models

    async def list(self) -> bytes:
        """All models, the base model first."""
        return json_of(await self._cards())

    async def one(self, name: str) -> bytes:
        """The model `name`. Raises ApiError (404)."""
        for card in (await self._cards()).data:
            if card.id == name:
                return json_of(card)
        raise unknown_model()

    async def _cards(self) -> ModelList:
        cards = await self._models.show_available_models()
        for card in cards.data:
            card.root = card.id  # vLLM puts an adapter's folder on this machine there
        return cards
