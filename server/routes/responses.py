"""POST /v1/responses; GET and DELETE /v1/responses/{id}, and its cancel."""

from fastapi import APIRouter, Request, Response

from server.errors import ApiError
from server.gateway import context_of
from server.routes.access import ready_protocol
from server.routes.answer import answer, send

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Creates a response, streamed, whole, or in the background."""
    protocol = await ready_protocol(request)
    return await answer(request, protocol.responses.create)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """A stored response, or with `stream=true` the events of one made in the background."""
    protocol = await ready_protocol(request)
    stream, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if stream not in ("true", "false"):
        raise ApiError(400, "'stream' must be true or false.", param="stream")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise ApiError(400, "'starting_after' must be the number of an event.", param="starting_after")
    found = await protocol.responses.retrieve(
        response_id,
        context_of(request),
        stream=stream == "true",
        starting_after=None if after is None else int(after),
    )
    return await send(request, found)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Cancels a response that is being made in the background."""
    protocol = await ready_protocol(request)
    body = await protocol.responses.cancel(response_id, context_of(request))
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forgets a stored response."""
    protocol = await ready_protocol(request)
    body = await protocol.responses.delete(response_id, context_of(request))
    return Response(body, media_type="application/json")
