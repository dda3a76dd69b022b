"""Health as the public port and the admin port tell it."""

from dataclasses import dataclass, field
from typing import Any

from server import __version__
from server.config import Settings


@dataclass(frozen=True)
class Health:
    """Whether requests can be served now, and if not, why."""

    ready: bool
    state: str
    """Of the engine (EngineState)."""
    reason: str | None
    more: dict[str, Any] = field(default_factory=dict)

    def body(self, settings: Settings) -> dict[str, Any]:
        """The JSON of `GET /health`."""
        return {
            "ready": self.ready,
            "model": settings.engine.public_model_name,
            "engine": {"kind": settings.engine.kind, "state": self.state},
            "reason": self.reason,
            "version": __version__,
            **self.more,
        }
