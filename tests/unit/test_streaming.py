"""The SSE body: one error event at most, and always closed."""

import asyncio
from collections.abc import AsyncGenerator

from server.context import RequestContext
from server.errors import unavailable
from server.streaming import StreamBroken, _body


def _run(events: AsyncGenerator[bytes, None], take: int | None = None) -> tuple[list[bytes], RequestContext]:
    ctx = RequestContext("POST", "/v1/chat/completions")

    async def collect() -> list[bytes]:
        first = asyncio.ensure_future(anext(events))
        body = _body(ctx, first, events)
        got = []
        async for event in body:
            got.append(event)
            if len(got) == take:
                await body.aclose()  # type: ignore[attr-defined]
                break
        return got

    return asyncio.run(collect()), ctx


async def _events(*items: bytes | Exception, closed: list[bool]) -> AsyncGenerator[bytes, None]:
    try:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        closed.append(True)


def test_whole_stream() -> None:
    """All events, nothing noted."""
    closed: list[bool] = []
    got, ctx = _run(_events(b"1", b"2", closed=closed))
    assert (got, ctx.outcome, closed) == ([b"1", b"2"], None, [True])


def test_known_error_becomes_the_last_event() -> None:
    """The error's own body, and the outcome for the metrics."""
    got, ctx = _run(_events(b"1", StreamBroken(unavailable("gone")), b"never", closed=[]))
    assert got[0] == b"1"
    assert b'"message":"gone"' in got[1]
    assert len(got) == 2
    assert ctx.outcome == "stream_error"


def test_unknown_error_says_nothing_of_the_inside() -> None:
    """No exception text on the wire."""
    got, ctx = _run(_events(b"1", RuntimeError("secret"), closed=[]))
    assert b"internal_error" in got[-1]
    assert b"secret" not in got[-1]
    assert ctx.outcome == "stream_error"


def test_reader_that_leaves_closes_the_events() -> None:
    """Closing the body closes the engine's generator, which aborts its request."""
    closed: list[bool] = []
    _, ctx = _run(_events(b"1", b"2", closed=closed), take=1)
    assert closed == [True]
    assert ctx.outcome == "disconnected"
