"""How every route that the engine works for answers: the body read, a client that leaves noticed."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from server.context import RequestContext
from server.gateway import context_of, gateway_of
from server.limits import admit
from server.protocol.answers import Answer
from server.routes.body import json_body
from server.streaming import stream_response, until_disconnect


async def answer(
    request: Request, serve: Callable[[bytes, RequestContext], Coroutine[Any, Any, Answer]]
) -> Response:
    """What `serve` makes of the body: JSON, or a stream of SSE events. 429 where a limit refuses.

    What the request holds of its limits is given back by RequestScope, however it ends.
    """
    gateway, ctx = gateway_of(request), context_of(request)
    await admit(gateway.limiter, ctx)
    body = await json_body(request)
    gateway.engine.track(ctx)
    return await send(request, await until_disconnect(request, ctx, serve(body, ctx)))


async def send(request: Request, answer: Answer) -> Response:
    """A JSON body, or a stream of SSE events, as an HTTP answer."""
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/json")
    ping_s = gateway_of(request).settings.gateway.sse_ping_s
    return await stream_response(request, context_of(request), answer, ping_s)
