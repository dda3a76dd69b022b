"""uvicorn's HTTP connection: limits on slow clients and large heads, refusals as JSON, no upgrades."""

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

log = structlog.get_logger()

MAX_HEAD_BYTES = 2**16
"""Request line and headers of one request."""
UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


INVALID = ApiError(400, "The request is not valid HTTP/1.1.", code="invalid_http")
TIMED_OUT = ApiError(408, "The request did not arrive in time.", code="request_timeout")
HEAD_TOO_LARGE = ApiError(
    431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.", code="headers_too_large"
)


def _on_the_wire(error: ApiError) -> bytes:
    """`error` as the last answer of a connection."""
    response = error.response("")
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


class HeadTooLarge(Exception):
    """Raised from a parser callback once the head has crossed the limit."""


class Connection(HttpToolsProtocol):
    """A connection that is closed when a request, or the reading of an answer, takes too long.

    uvicorn bounds only the idle time between two requests: a client that sends a byte now and then
    (slowloris), or does not read, would hold its connection, its memory and its engine request for ever.
    A request that arrives while an earlier one is answered (pipelining) never disturbs that answer.
    """

    request_timeout_s: float
    read_timeout_s: float

    def connection_made(self, transport: Any) -> None:
        """A client has come: its first request has to follow in time."""
        super().connection_made(transport)
        self._request_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._in_head = False
        self._head_is_new = False
        self._header_bytes = 0
        """Of the whole headers that have come."""
        self._waiting_bytes = 0
        """Received for the head that is arriving, after the first bytes of it."""
        self._given_up = False
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._forget_request()
        self.resume_writing()
        if self._answering is not None and self._answering is not self.cycle:
            # uvicorn tells the latest request alone, which may still wait behind this one.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, but for upgrades, the limit on heads, and what is refused how."""
        if self._given_up:
            return
        self._head_is_new = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse(HEAD_TOO_LARGE if isinstance(error.__context__, HeadTooLarge) else INVALID)
        except httptools.HttpParserError:
            self._refuse(INVALID)
        else:
            if self._in_head and not self._head_is_new:
                self._waiting_bytes += len(data)
                if self._waiting_bytes > MAX_HEAD_BYTES:
                    self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """First byte of a request. Blank lines before it are none: they do not stop the idle timer."""
        self._unset_keepalive_if_required()
        self._expect_request()
        self._in_head = self._head_is_new = True
        self._header_bytes = self._waiting_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        """The head has come: the request starts, or waits for those before it."""
        self._in_head = False
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        cycle = self.cycle
        self.scope["state"]["body_pending"] = lambda: cycle.more_body

    def on_message_complete(self) -> None:
        """Last byte of a request."""
        self._forget_request()
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads the request once more without its wish to change the protocol, which HTTP lets us ignore.

        Java's HttpClient wishes for h2c with each first request; httptools then takes the body for data of
        the other protocol.
        """
        if self.parser.get_method() == b"CONNECT":
            self._refuse(INVALID)
            return
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _expect_request(self) -> None:
        self._forget_request()
        self._request_timer = self.loop.call_later(self.request_timeout_s, self._request_timed_out)

    def _forget_request(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _request_timed_out(self) -> None:
        self._refuse(TIMED_OUT if self.scope is not None else None)

    def _refuse(self, error: ApiError | None) -> None:
        """Gives up on the request that is arriving: `error`, and the end.

        While an earlier request is answered, that answer is the last one instead.
        """
        self._given_up = True
        self._forget_request()
        current = self._answering
        if current is not None and not current.response_complete and not current.more_body:
            current.keep_alive = False
            return
        begun = current is not None and current.response_started and not current.response_complete
        if error is not None and not begun:
            log.info("connection_refused", status=error.status, code=error.code)
            self.transport.write(_on_the_wire(error))
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
