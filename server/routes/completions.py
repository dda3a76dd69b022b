"""POST /v1/chat/completions and /v1/completions."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response

from server.context import RequestContext
from server.gateway import context_of, gateway_of
from server.protocol.serving import Answer
from server.routes.access import admitted_protocol
from server.streaming import stream_response, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Creates a chat completion, streamed or whole."""
    protocol = await admitted_protocol(request)
    return await _complete(request, protocol.chat)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Creates a text completion, streamed or whole."""
    protocol = await admitted_protocol(request)
    return await _complete(request, protocol.completion)


async def _complete(
    request: Request, serve: Callable[[bytes, RequestContext], Coroutine[Any, Any, Answer]]
) -> Response:
    gateway, ctx = gateway_of(request), context_of(request)
    body = await request.body()
    gateway.engine.track(ctx)
    answer = await until_disconnect(request, ctx, serve(body, ctx))
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/json")
    return await stream_response(request, ctx, answer, gateway.settings.gateway.sse_ping_s)
