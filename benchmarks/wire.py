"""One HTTP/1.1 exchange over a raw socket, with the rude ways to end it that HTTP libraries do not offer."""

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 65536
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, zero seconds: close sends RST


@dataclass(frozen=True)
class Target:
    """A server with the key and the model name to use."""

    url: str
    key: str
    model: str


def request(
    target: Target,
    path: str,
    body: bytes | dict[str, Any],
    *,
    key: str | None = "",
    method: str = "POST",
    keep_open: bool = False,
) -> bytes:
    """The bytes of a request; `key` is the target's own unless given, None sends none."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(target.url).netloc}"]
    lines += [] if keep_open else ["Connection: close"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key or target.key}")
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]
    return "\r\n".join(lines).encode() + data


class Connection:
    """One connection: send, read, end politely or not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Writes all of `data`."""
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Reads the head of the answer; 0 when the connection ends before it."""
        line = await self.reader.readline()
        if not line:
            return 0
        while (await self.reader.readline()).strip():
            pass
        return int(line.split()[1])

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of an answer that tells its length, on a connection that stays open."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        body = await self.reader.readexactly(int(length.group(1)) if length else 0)
        return int(head.split(maxsplit=2)[1]), body

    async def body(self) -> bytes:
        """All that follows, until the server closes the connection."""
        return await self.reader.read()

    def close(self) -> None:
        """Ends the connection with an ordinary FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.writer.transport.abort()


@asynccontextmanager
async def connected(target: Target, *, receive_bytes: int | None = None) -> AsyncIterator[Connection]:
    """A connection, closed when the block is left; `receive_bytes` is the size of the kernel's buffer."""
    address = urlsplit(target.url)
    sock = socket.socket()
    sock.setblocking(False)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (str(address.hostname), int(address.port or 80)))
    except OSError:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or READ_BYTES)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
