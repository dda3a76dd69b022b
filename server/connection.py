"""uvicorn's HTTP connection, with limits on what a slow client may cost."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A connection that is closed when a request, or the reading of an answer, takes too long.

    uvicorn bounds only the idle time between two requests: a client that sends a byte now and then
    (slowloris), or does not read, would hold its connection, its memory and its engine request for ever.
    """

    request_timeout_s: float
    read_timeout_s: float

    def connection_made(self, transport: Any) -> None:
        """A client has come: its first request has to follow in time."""
        super().connection_made(transport)
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._forget_request()
        self.resume_writing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """First byte of a request."""
        self._expect_request()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Last byte of a request."""
        self._forget_request()
        super().on_message_complete()

    def _expect_request(self) -> None:
        self._forget_request()
        self._request_timer = self.loop.call_later(self.request_timeout_s, self._request_timed_out)

    def _forget_request(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _request_timed_out(self) -> None:
        if self.scope is not None and (self.cycle is None or not self.cycle.response_started):
            self.transport.write(TIMED_OUT)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read, and the transport's buffer is full."""
        self._read_timer = self.loop.call_later(self.read_timeout_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()


def connection_class(request_timeout_s: float, read_timeout_s: float) -> type[Connection]:
    """`Connection` with these limits in seconds, as uvicorn wants it: a class."""
    limits = {"request_timeout_s": request_timeout_s, "read_timeout_s": read_timeout_s}
    return type("LimitedConnection", (Connection,), limits)
