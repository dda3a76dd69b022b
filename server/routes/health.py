"""/health, /livez, /readyz and /metrics: no key needed. The same on the public and on the admin port."""

import asyncio
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from metrics import batched
from metrics.page import metrics_page
from server.config import Settings
from server.health import Health


def health_router(settings: Settings, health: Callable[[], Health]) -> APIRouter:
    """Routes that tell what `health()` says."""
    router = APIRouter()

    @router.get("/health")
    async def health_() -> JSONResponse:
        """200 while requests can be served, else 503; the body says why."""
        now = health()
        return JSONResponse(now.body(settings), 200 if now.ready else 503)

    @router.get("/livez")
    async def livez() -> PlainTextResponse:
        """200 while the process answers at all."""
        return PlainTextResponse("ok\n")

    @router.get("/readyz")
    async def readyz() -> PlainTextResponse:
        """200 while requests can be served, else 503."""
        ready = health().ready
        return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text over all processes: `lapilli_*`, `vllm:*`, and `process_*` of this one."""
        batched.flush()
        return Response(await asyncio.to_thread(metrics_page), media_type=CONTENT_TYPE_LATEST)

    return router
