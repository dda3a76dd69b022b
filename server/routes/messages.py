"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, its errors in Anthropic's words."""

from fastapi import APIRouter, Request, Response

from server.gateway import context_of
from server.routes.access import ready_protocol
from server.routes.answer import answer
from server.routes.body import json_body

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Creates a message, streamed or whole (Anthropic)."""
    protocol = await ready_protocol(request)
    return await answer(request, protocol.messages.create)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """The number of input tokens a message would have (Anthropic)."""
    protocol = await ready_protocol(request)
    content = await protocol.messages.count_tokens(await json_body(request), context_of(request))
    return Response(content, media_type="application/json")
