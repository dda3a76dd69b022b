"""The parts that routes need, in one object: `request.app.state.gateway`."""

from dataclasses import dataclass
from typing import cast

from starlette.requests import HTTPConnection

from auth.store import KeyStore
from metrics.requests import RequestMetrics
from server.config import Settings
from server.context import RequestContext
from server.engine.client import Engine
from server.protocol.serving import OpenAIProtocol


@dataclass
class Gateway:
    """Everything with a life of its own that a request touches."""

    settings: Settings
    keys: KeyStore
    metrics: RequestMetrics
    engine: Engine
    protocol: OpenAIProtocol | None = None
    """vLLM's serving classes; None until the engine is ready."""


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that serves this request."""
    return cast(Gateway, connection.app.state.gateway)


def context_of(connection: HTTPConnection) -> RequestContext:
    """This request's context, made by the outermost middleware."""
    return cast(RequestContext, connection.scope["state"]["context"])
