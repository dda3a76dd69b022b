"""GET /v1/models."""

from fastapi import APIRouter, Response

from server.routes.access import ReadyProtocol

router = APIRouter()


@router.get("/v1/models")
async def models(protocol: ReadyProtocol) -> Response:
    """The models this server offers."""
    return Response(await protocol.models(), media_type="application/json")
