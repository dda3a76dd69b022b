"""GET /openapi.json: no key needed, it says nothing of the deployment."""

import asyncio

from fastapi import APIRouter, Request, Response

from server.openapi import document_bytes

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The OpenAPI document of this port."""
    page = await asyncio.to_thread(document_bytes, request.app)
    return Response(page, media_type="application/json")
