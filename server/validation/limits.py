"""What one model, as it is served here, can take: the figures that the rules are driven by."""

from dataclasses import dataclass, field
from typing import Any

from server.sections import RequestSettings

MAX_TOP_LOGPROBS = 20
"""OpenAI's bound on `top_logprobs`."""


@dataclass(frozen=True)
class ModelLimits:
    """Bounds of one model, and the operator's bounds on requests to it. Sizes are tokens."""

    vocab_size: int
    """Rows of the model's own embedding table: a tokenizer may know ids past it."""
    max_model_len: int
    max_logprobs: int = MAX_TOP_LOGPROBS
    modalities: frozenset[str] = frozenset()
    """What the model takes besides text: `image`, `audio`, `video`."""
    settings: RequestSettings = field(default_factory=RequestSettings)

    @classmethod
    def of(cls, model_config: Any, renderer: Any, settings: RequestSettings) -> "ModelLimits":
        """The limits of a model, from vLLM's ModelConfig and renderer."""
        vocab_size = model_config.get_vocab_size()
        max_logprobs = model_config.max_logprobs
        processor = renderer.mm_processor
        media = processor.info.allowed_mm_limits if processor is not None else {}
        return cls(
            vocab_size=vocab_size,
            max_model_len=model_config.max_model_len,
            max_logprobs=vocab_size if max_logprobs == -1 else max_logprobs,
            modalities=frozenset(name for name, most in media.items() if most > 0),
            settings=settings,
        )
