"""POST /v1/embeddings."""

from fastapi import APIRouter, Request, Response

from server.routes.access import ready_protocol
from server.routes.answer import answer

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Creates embeddings of one or several inputs, where the served model makes them."""
    protocol = await ready_protocol(request)
    return await answer(request, protocol.embeddings.create)
