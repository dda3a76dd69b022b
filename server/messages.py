"""What the supervisor and a gateway worker say to each other over their pipe."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Hello:
    """Worker: I am here."""


@dataclass(frozen=True)
class Attach:
    """Supervisor: an engine is there; become its client number `index` of `count`."""

    addresses: dict[str, Any]
    index: int
    count: int
    core_pids: tuple[int, ...]


@dataclass(frozen=True)
class Attached:
    """Worker: I am the engine's client; or `error` says in one line why not."""

    error: str | None = None


@dataclass(frozen=True)
class Check:
    """Supervisor: check the engine's numbers (server/engine/selfcheck.py)."""


@dataclass(frozen=True)
class Checked:
    """Worker: the numbers are right; or `error` says which are not."""

    error: str | None = None


@dataclass(frozen=True)
class Serve:
    """Supervisor: serve requests."""


@dataclass(frozen=True)
class EngineLost:
    """Supervisor: the engine is gone, or will never serve (`failed`). Open requests have to end."""

    reason: str
    failed: bool = False


@dataclass(frozen=True)
class Drain:
    """Supervisor: take no new requests, let the running ones finish within `limit_s` seconds, then leave."""

    limit_s: float


class Channel:
    """One end of the pipe, on an event loop. Messages are small; sending blocks for microseconds."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Calls `on_message` for each message, and `on_end` once when the other end is gone."""
        self._loop = asyncio.get_running_loop()

        def readable() -> None:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self.close()
                on_end()
                return
            on_message(message)

        self._loop.add_reader(self._connection.fileno(), readable)

    def send(self, message: Any) -> None:
        """Sends; a message to an end that is gone is dropped (its `on_end` tells)."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """Closes this end; harmless when called again."""
        if not self._connection.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
