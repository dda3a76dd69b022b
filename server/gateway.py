"""The parts that routes need, in one object: `request.app.state.gateway`."""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from starlette.requests import HTTPConnection

from auth.audit import AuditLog
from auth.identity import Identity
from auth.limiter import Limiter
from auth.services import Services
from metrics.requests import RequestMetrics
from server.batches.files import FileStore
from server.batches.store import BatchStore
from server.config import Settings
from server.context import RequestContext
from server.engine.client import Engine
from server.health import Health
from server.protocol.serving import OpenAIProtocol

DRAINING = "the server is shutting down"


@dataclass
class Gateway:
    """Everything with a life of its own that a request touches."""

    settings: Settings
    identity: Identity
    services: Services
    metrics: RequestMetrics
    audit: AuditLog
    engine: Engine
    limiter: Limiter
    protocol: OpenAIProtocol | None = None
    """vLLM's serving classes; None until the worker is attached to an engine."""
    draining: bool = False
    """Shutting down: running requests go on, new ones are refused."""

    @cached_property
    def files(self) -> FileStore:
        """Files of tenants."""
        return FileStore(self.identity.database, self.settings.batch)

    @cached_property
    def batches(self) -> BatchStore:
        """Batches of tenants."""
        model = self.settings.engine.public_model_name
        return BatchStore(self.identity.database, self.settings.batch, model)

    def health(self) -> Health:
        """This worker's health."""
        return Health(
            ready=self.engine.ready and not self.draining,
            state=str(self.engine.state),
            reason=DRAINING if self.draining else self.engine.reason,
        )


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request."""
    return cast(Gateway, connection.app.state.gateway)


def context_of(connection: HTTPConnection) -> RequestContext:
    """This request's context, made by the outermost middleware."""
    return cast(RequestContext, connection.scope["state"]["context"])
