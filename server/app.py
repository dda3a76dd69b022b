"""The FastAPI application: one factory, one visible stack of layers."""

from fastapi import FastAPI

from server import __version__, errors
from server.gateway import Gateway
from server.middleware import BodyLimit, RequestScope
from server.routes import completions, health, models


def create_app(gateway: Gateway) -> FastAPI:
    """The application over `gateway`'s parts. It starts nothing: server/serve.py does."""
    app = FastAPI(title="Lapilli", version=__version__, redirect_slashes=False)
    app.state.gateway = gateway
    errors.install(app)
    for routes in (completions, models, health):
        app.include_router(routes.router)
    # add_middleware puts each new layer outside the former: the last one is the outermost.
    app.add_middleware(BodyLimit, max_bytes=gateway.settings.gateway.max_body_bytes)
    app.add_middleware(RequestScope, metrics=gateway.metrics)
    return app
