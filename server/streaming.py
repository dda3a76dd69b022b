"""From a generator of SSE events to an HTTP answer: errors before the first byte, pings, disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send

from server.context import RequestContext
from server.errors import ApiError, internal_error

log = structlog.get_logger()

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The event that ends a whole stream; none comes after it."""


class StreamBroken(Exception):
    """The stream can't go on; `error` says why. `number`: how many events came before, where they count."""

    def __init__(self, error: ApiError, number: int = 0) -> None:
        super().__init__(error.message)
        self.error = error
        self.number = number


async def until_disconnect(request: Request, ctx: RequestContext, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves first, `work` is cancelled (and its request aborted).

    Raises ClientDisconnect then. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    try:
        await _done_or_disconnected(request, ctx, task)
        return task.result()
    finally:
        await _cancelled(task)


async def _done_or_disconnected(
    request: Request, ctx: RequestContext, task: "asyncio.Future[Any]", timeout_s: float | None = None
) -> None:
    """Waits until `task` is done, `timeout_s` at most. ClientDisconnect: the client left first."""
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done() and not task.done():
            ctx.outcome = "disconnected"
            raise ClientDisconnect
    finally:
        await _cancelled(watcher)


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Ends a task that nobody waits for any more."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stream_response(
    request: Request, ctx: RequestContext, events: AsyncGenerator[bytes, None], ping_s: float
) -> EventSourceResponse:
    """Answers with `events` (whole SSE events as bytes), once the first one is there.

    What goes wrong before it is an ordinary HTTP error (StreamBroken's ApiError is raised). When the
    first event takes longer than `ping_s` seconds, the answer begins without it and pings keep it alive.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await _done_or_disconnected(request, ctx, first, ping_s)
        if first.done():
            first.result()
    except BaseException as error:
        await _cancelled(first)
        await events.aclose()
        if isinstance(error, StreamBroken):
            raise error.error from error
        raise
    return EventStream(
        ctx,
        _body(ctx, first, events),
        ping=ping_s,
        sep="\n",
        ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
    )


class EventStream(EventSourceResponse):
    """sse-starlette's response (pings, disconnect, shutdown) fed with whole events as bytes.

    Only its inner loop is ours: the library's encodes, logs and opens a cancel scope for every event. While
    it runs, `RequestContext.write` sends events past it.
    """

    def __init__(self, ctx: RequestContext, events: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(events, **options)
        self._ctx = ctx

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = cast(AsyncGenerator[bytes, None], self.body_iterator)
        self._ctx.write = partial(_write_now, self._ctx.send or send)
        last = b""
        try:
            async for event in events:
                if event.endswith(DONE):
                    # Goes out with the end of the answer: one write less, one wake of the client.
                    last = event
                else:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            self._ctx.write = None
            # Cancelled inside `send` (a slow reader that leaves), the generator is still suspended.
            with anyio.CancelScope(shield=True):
                await events.aclose()
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _write_now(send: Send, event: bytes) -> bool:
    """Sends `event` without a task; False, and nothing sent, when that would have to wait.

    uvicorn's `send` waits for nothing but a connection that is full, and does so before it writes: a first
    step that does not end has written nothing, and may be dropped.
    """
    sending = send({"type": "http.response.body", "body": event, "more_body": True})
    step = sending.__await__()
    try:
        next(step)
    except StopIteration:
        return True
    except Exception:  # the stream's own task will meet it, and end this stream alone
        return False
    step.close()
    return False


async def _body(
    ctx: RequestContext, first: "asyncio.Future[bytes]", events: AsyncGenerator[bytes, None]
) -> AsyncIterator[bytes]:
    """All events, or those until an error and then one error event, with no [DONE] after it."""
    finished = False
    try:
        yield await first
        async for event in events:
            yield event
        finished = True
    except StreamBroken as broken:
        finished = True
        ctx.outcome = "stream_error"
        yield broken.error.event(ctx.path, broken.number)
    except Exception:
        finished = True
        ctx.outcome = "stream_error"
        log.exception("stream_error", request_id=ctx.id)
        yield internal_error().event(ctx.path)
    finally:
        if not finished:
            ctx.outcome = "disconnected"
            first.cancel()
        await events.aclose()
