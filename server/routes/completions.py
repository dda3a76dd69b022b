"""POST /v1/chat/completions and /v1/completions."""

from fastapi import APIRouter, Request, Response

from server.routes.access import ready_protocol
from server.routes.answer import answer

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Creates a chat completion, streamed or whole."""
    protocol = await ready_protocol(request)
    return await answer(request, protocol.chat)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Creates a text completion, streamed or whole."""
    protocol = await ready_protocol(request)
    return await answer(request, protocol.completion)
