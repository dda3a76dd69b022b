"""The FastAPI application: one factory, one visible stack of layers."""

from fastapi import FastAPI

from server import __version__, errors, methods
from server.cors import Cors
from server.gateway import Gateway
from server.methods import HeadAsGet
from server.middleware import BodyLimit, RequestScope
from server.routes import (
    batches,
    completions,
    embeddings,
    files,
    messages,
    models,
    openapi,
    responses,
    tokens,
)
from server.routes.health import health_router


def create_app(gateway: Gateway) -> FastAPI:
    """The application over `gateway`'s parts. It starts nothing: server/serve.py does."""
    app = FastAPI(title="Lapilli", version=__version__, redirect_slashes=False, openapi_url=None)
    app.state.gateway = gateway
    errors.install(app)
    methods.install(app)
    nouns = (completions, embeddings, responses, messages, models, tokens, files, batches, openapi)
    for noun in nouns:
        app.include_router(noun.router)
    app.include_router(health_router(gateway.settings, gateway.health))
    # add_middleware puts each new layer outside the former: the last one is the outermost.
    app.add_middleware(HeadAsGet)
    uploads = {files.PATH: files.max_upload_bytes(gateway.settings.batch)}
    app.add_middleware(BodyLimit, max_bytes=gateway.settings.gateway.max_body_bytes, by_path=uploads)
    app.add_middleware(
        RequestScope,
        metrics=gateway.metrics,
        services=gateway.services,
        limiter=gateway.limiter,
        audit=gateway.audit,
    )
    if gateway.settings.gateway.cors_origins:
        app.add_middleware(Cors, settings=gateway.settings.gateway)
    return app
