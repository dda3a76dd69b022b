"""/health, /livez, /readyz and /metrics: no key needed."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from metrics import batched
from server import __version__
from server.gateway import Gateway, gateway_of

router = APIRouter()


def health_body(gateway: Gateway) -> dict[str, Any]:
    """What /health says: readiness, the model, the engine's kind and state, why it is not ready."""
    engine = gateway.engine
    return {
        "ready": engine.ready,
        "model": gateway.settings.engine.public_model_name,
        "engine": {"kind": gateway.settings.engine.kind, "state": str(engine.state)},
        "reason": engine.reason,
        "version": __version__,
    }


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while requests can be served, else 503; the body says why."""
    body = health_body(gateway_of(request))
    return JSONResponse(body, 200 if body["ready"] else 503)


@router.get("/livez")
async def livez() -> PlainTextResponse:
    """200 while the process answers at all."""
    return PlainTextResponse("ok\n")


@router.get("/readyz")
async def readyz(request: Request) -> PlainTextResponse:
    """200 while requests can be served, else 503."""
    ready = gateway_of(request).engine.ready
    return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text: the gateway's `lapilli_*` series, then vLLM's `vllm:*` and the process's own."""
    gateway = gateway_of(request)
    gateway.metrics.set_ready(gateway.engine.ready)
    batched.flush()
    page = generate_latest(gateway.metrics.registry) + generate_latest(REGISTRY)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
