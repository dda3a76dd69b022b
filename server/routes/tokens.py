"""POST /tokenize and /detokenize."""

from fastapi import APIRouter, Request, Response

from server.gateway import context_of
from server.routes.access import ready_protocol
from server.routes.body import json_body

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of messages in the model's chat template."""
    protocol = await ready_protocol(request)
    content = await protocol.tokens.tokenize(await json_body(request), context_of(request))
    return Response(content, media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    protocol = await ready_protocol(request)
    content = await protocol.tokens.detokenize(await json_body(request), context_of(request))
    return Response(content, media_type="application/json")
