"""HTTP by hand, for what client libraries would not send."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.conftest import Server


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Wire:
    """A TCP connection to a server that sends any bytes and reads answers one by one."""

    def __init__(self, server: Server, timeout_s: float = 20) -> None:
        self._key = server.key
        port = int(server.url.rsplit(":", 1)[1])
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._buffer = b""

    def head(self, method: str, path: str, *lines: str, key: bool = True) -> bytes:
        """A request's head with a host, the key, and `lines`."""
        auth = [f"Authorization: Bearer {self._key}"] if key else []
        return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *auth, *lines, "", ""]).encode("latin-1")

    def post(self, path: str, body: Any, *lines: str) -> bytes:
        """A whole POST of JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = ("Content-Type: application/json", f"Content-Length: {len(data)}", *lines)
        return self.head("POST", path, *more) + data

    def send(self, data: bytes) -> None:
        """Sends `data`, all of it."""
        self.socket.sendall(data)

    def readable(self, wait_s: float = 0) -> bool:
        """Whether something has come, or the server has closed, within `wait_s` seconds."""
        return bool(self._buffer) or bool(select.select([self.socket], [], [], wait_s)[0])

    def until(self, mark: bytes) -> bytes:
        """All that comes up to `mark`, with it."""
        while mark not in self._buffer:
            part = self.socket.recv(65536)
            assert part, f"closed; before that: {self._buffer[-200:]!r}"
            self._buffer += part
        found, self._buffer = self._buffer.split(mark, 1)
        return found + mark

    def answer(self) -> Answer:
        """The next answer, after any 100 Continue."""
        first, *lines = self.until(b"\r\n\r\n").decode("latin-1").strip().split("\r\n")
        status = int(first.split()[1])
        if status == 100:
            return self.answer()
        pairs = [line.split(":", 1) for line in lines]
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        return Answer(status, headers, self._body(headers))

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(self._chunks())
        size = int(headers.get("content-length", "0"))
        while len(self._buffer) < size:
            part = self.socket.recv(65536)
            assert part, "closed within a body"
            self._buffer += part
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return body

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.until(b"\r\n"), 16):
            yield self._exactly(size)
            self.until(b"\r\n")
        self.until(b"\r\n")

    def _exactly(self, size: int) -> bytes:
        return self._body({"content-length": str(size)})

    def closed(self) -> bool:
        """Whether the server closes the connection, with nothing more on it."""
        try:
            return not self._buffer and self.socket.recv(65536) == b""
        except ConnectionResetError:
            return True


@contextmanager
def connected(server: Server, timeout_s: float = 20) -> Iterator[Wire]:
    """A Wire, closed on leaving."""
    wire = Wire(server, timeout_s)
    try:
        yield wire
    finally:
        wire.socket.close()
