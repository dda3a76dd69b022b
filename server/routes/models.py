"""GET /v1/models."""

from fastapi import APIRouter, Request, Response

from server.routes.access import ready_protocol

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The models this server offers."""
    protocol = await ready_protocol(request)
    return Response(await protocol.models(), media_type="application/json")
