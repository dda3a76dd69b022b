"""One line of a batch, worked on as if it had come over HTTP: same checks, same errors."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import orjson
import structlog

from auth.audit_content import Content
from auth.principal import Principal
from auth.services import Service
from server.context import RequestContext
from server.errors import ApiError, body_too_large, internal_error
from server.gateway import Gateway
from server.limits import admit, body_limit
from server.protocol.answers import Answer
from server.protocol.serving import OpenAIProtocol

log = structlog.get_logger()

PRIORITY = 100
"""Behind all requests of clients, whose priority is 0."""
ENDPOINTS: dict[str, Callable[[OpenAIProtocol], Callable[..., Coroutine[Any, Any, Answer]]]] = {
    "/v1/chat/completions": lambda protocol: protocol.chat,
    "/v1/completions": lambda protocol: protocol.completion,
    "/v1/embeddings": lambda protocol: protocol.embeddings.create,
}
"""What a batch may ask for."""


class _Options(msgspec.Struct):
    stream: Any = None


@dataclasses.dataclass(frozen=True)
class CallResult:
    """An answer as a line of output tells it."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: int | None
    """Not now: to be tried again after so many seconds."""


async def call(
    gateway: Gateway, endpoint: str, body: bytes, principal: Principal, service: Service
) -> CallResult:
    """The answer to `body`. Needs a protocol, so a worker that has been attached to an engine."""
    caller = dataclasses.replace(principal, service_class="batch")
    ctx = RequestContext("POST", endpoint, service=service, principal=caller, priority=PRIORITY)
    if gateway.audit.keeps_content(caller):
        ctx.content = Content(body)
    gateway.metrics.begin_line()
    try:
        answer, retry_after_s = await _answer(gateway, body, ctx), None
        ctx.status = 200
    except ApiError as error:
        if _cancelled():
            raise asyncio.CancelledError from None  # vLLM's serving classes make an answer of it
        ctx.status = error.status
        answer, retry_after_s = orjson.dumps(error.body(endpoint)), _seconds(error)
    except Exception:
        log.exception("unhandled_error", request_id=ctx.id, path=ctx.path)
        ctx.status = 500
        answer, retry_after_s = orjson.dumps(internal_error().body(endpoint)), None
    finally:
        if ctx.status is None:
            ctx.outcome = "disconnected"
        elif ctx.content is not None:
            ctx.content.answered(answer)
        if ctx.reservation is not None:
            gateway.limiter.settle_soon(ctx.reservation)
        gateway.metrics.end_line(ctx)
        gateway.audit.request_ended(ctx, time.monotonic() - ctx.received_at)
    return CallResult(ctx.status, ctx.id, answer, retry_after_s)


async def _answer(gateway: Gateway, body: bytes, ctx: RequestContext) -> bytes:
    assert gateway.protocol is not None
    ctx.request_bytes = len(body)
    if _asks_for_stream(body):
        raise ApiError(400, "A request of a batch can't be streamed.", param="stream")
    if len(body) > (limit := body_limit(ctx.principal, gateway.settings.gateway.max_body_bytes)):
        raise body_too_large(limit)
    await admit(gateway.limiter, ctx)
    gateway.engine.track(ctx)
    answer = await ENDPOINTS[ctx.path](gateway.protocol)(body, ctx)
    assert isinstance(answer, bytes)
    return answer


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _asks_for_stream(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Options).stream)
    except msgspec.DecodeError:
        return False  # the endpoint says what is wrong with it


def _seconds(error: ApiError) -> int | None:
    """When to try again; None for what would be refused again, as where a quota is used up."""
    if error.status not in (429, 503) or error.headers.get("x-should-retry") == "false":
        return None
    return int(error.headers.get("Retry-After", 1))
