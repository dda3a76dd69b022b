"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter, Request, Response

from server.gateway import context_of
from server.routes.access import ready_protocol

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The models this server offers: the base model and its LoRA adapters."""
    protocol = await ready_protocol(request)
    return Response(await protocol.models.list(context_of(request)), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> Response:
    """One model."""
    protocol = await ready_protocol(request)
    return Response(await protocol.models.one(model, context_of(request)), media_type="application/json")
