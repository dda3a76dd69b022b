"""One connection to Redis for all requests of a worker: scripts run in the order in which they were called.

redis-py makes the connection (address, TLS, password) and reads and writes the protocol. Its client would
take a connection from a pool for each command and give it up when the caller is cancelled, so that what a
cancelled request had reserved could arrive after the word that gives it back. Here the answers of cancelled
callers are read and dropped, and the order holds.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from auth.limits import StoreUnavailable

log = structlog.get_logger()

PAUSE_S = 0.5
"""After a failed connection, calls fail at once for so long before the next one tries again."""

Command = tuple[str, list[str], list[str | int]]
"""Name of a script, its KEYS, its ARGV."""


class RedisLine:
    """Runs scripts by name. Every failure is StoreUnavailable; the next call connects again."""

    def __init__(
        self,
        url: str,
        scripts: Mapping[str, str],
        *,
        timeout_s: float,
        first: Callable[[], Iterable[Command]] = tuple,
    ) -> None:
        """`first` gives what a new connection runs before all else. Raises ValueError for a bad URL."""
        self._pool = ConnectionPool.from_url(
            url, socket_timeout=None, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        self._scripts = scripts
        self._digests: dict[str, bytes] = {}
        self._timeout_s = timeout_s
        self._first = first
        self._connection: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._connecting = asyncio.Lock()
        self._try_again_at = -math.inf

    async def open(self) -> None:
        """Connects ahead of the first call. Raises StoreUnavailable."""
        await self._connect()

    async def run(self, command: Command) -> Any:
        """What the script returns. Raises StoreUnavailable; it may have run all the same (`sent`)."""
        if self._connection is None:
            await self._connect()
        try:
            return await self._exchange(*self._packed(command))
        except NoScriptError:  # somebody emptied Redis's script cache; it has not run
            self._drop("NOSCRIPT")
            await self._connect()
            return await self._exchange(*self._packed(command))
        except ResponseError as error:
            log.error("limits_script_failed", script=command[0], error=str(error))
            raise StoreUnavailable("Redis refused a script") from error

    async def close(self) -> None:
        """Ends the connection; callers that still wait get StoreUnavailable."""
        self._drop(None)
        await self._pool.aclose()

    def _packed(self, command: Command) -> tuple[Any, ...]:
        name, keys, args = command
        return ("EVALSHA", self._digests[name], len(keys), *keys, *args)

    async def _exchange(self, *words: Any) -> Any:
        connection = self._connection
        if connection is None or not connection.is_connected:
            # The reader has not met the end yet; redis-py would connect behind its back.
            self._drop("closed")
            raise StoreUnavailable("no connection to Redis")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        try:
            async with asyncio.timeout(self._timeout_s):
                # Writes at once, before it waits for anything: the order of calls is the order on the wire.
                await connection.send_packed_command(connection.pack_command(*words), check_health=False)
                return await answer
        except TimeoutError:
            self._drop(f"no answer within {self._timeout_s} s")
            raise StoreUnavailable("Redis does not answer", sent=True) from None
        except ResponseError:
            raise
        except (RedisError, OSError) as error:
            self._drop(str(error))
            raise StoreUnavailable("the connection to Redis broke", sent=True) from error

    async def _connect(self) -> None:
        async with self._connecting:
            if self._connection is not None:
                return
            if time.monotonic() < self._try_again_at:
                raise StoreUnavailable("no connection to Redis")
            connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(self._timeout_s):
                    await connection.connect()
                    for source in self._scripts.values():
                        await connection.send_command("SCRIPT", "LOAD", source)
                    for name in self._scripts:
                        self._digests[name] = await connection.read_response()
                    for command in self._first():
                        await connection.send_command(*self._packed(command))
                        await connection.read_response()
            except (RedisError, OSError, TimeoutError) as error:
                self._try_again_at = time.monotonic() + PAUSE_S
                log.warning("limits_store_down", error=str(error) or "no answer")
                await connection.disconnect(nowait=True)
                raise StoreUnavailable("no connection to Redis") from error
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._connection = connection
            self._reader = asyncio.create_task(self._read(connection))

    async def _read(self, connection: AbstractConnection) -> None:
        """Hands the answers to those who wait for them."""
        try:
            while True:
                try:
                    result = await connection.read_response(timeout=math.inf)
                except ResponseError as error:
                    result = error
                answer = self._waiting.popleft()
                if answer.done():
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
        except (RedisError, OSError) as error:
            if self._connection is connection:
                self._drop(str(error))

    def _drop(self, reason: str | None) -> None:
        """Gives the connection up; `reason` is None for an end that was meant."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if reason is not None:
            log.warning("limits_store_lost", error=reason)
        reader, self._reader = self._reader, None
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(StoreUnavailable("the connection to Redis broke", sent=True))
                answer.exception()  # whoever waited may be gone
        with contextlib.suppress(Exception):
            connection._close()  # type: ignore[no-untyped-call]
