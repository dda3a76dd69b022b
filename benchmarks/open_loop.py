"""Requests at set times, whatever became of the earlier ones (open loop), and clients that stay connected.

Times count from the moment a request was due, so that a late client hides nothing.
"""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from benchmarks.load import WORDS
from benchmarks.wire import Target, request

REQUEST_LIMIT_S = 30.0
TOKEN = re.compile(rb'"content":"[^"]')
LAST_CHUNK = b"0\r\n\r\n"
TAIL_BYTES = 32


class FailedError(Exception):
    """A request was not answered with a whole stream."""


@dataclass(frozen=True)
class Schedule:
    """When requests are due (seconds from the start, in order), and the number of the first one's prompt."""

    due_s: list[float]
    first_number: int


def poisson(rate_per_s: float, duration_s: float, first_number: int) -> Schedule:
    """Independent arrivals at `rate_per_s`; the same for the same `first_number`."""
    rng = random.Random(first_number)
    due_s: list[float] = []
    at = rng.expovariate(rate_per_s)
    while at < duration_s:
        due_s.append(at)
        at += rng.expovariate(rate_per_s)
    return Schedule(due_s, first_number)


def prompt(number: int, words: int) -> str:
    """The text of prompt `number`; no two are equal."""
    rng = random.Random(number)
    return f"{number} " + " ".join(rng.choices(WORDS, k=words))


async def timed(schedule: Schedule, first_token: Callable[[int], Awaitable[float]]) -> list[float | None]:
    """Seconds from when each request was due to its first token; None for one that failed.

    `first_token(number)` makes one request to its end and returns the time (perf_counter) of its first token.
    """

    async def one(number: int, due: float) -> float | None:
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                return await first_token(number) - due
        except (FailedError, OSError, TimeoutError):
            return None

    start = time.perf_counter()
    tasks = []
    for number, due_s in enumerate(schedule.due_s, start=schedule.first_number):
        await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number, start + due_s)))
    return await asyncio.gather(*tasks)


class HttpClient:
    """Streams chat answers over connections that stay open; a request with no free one opens another."""

    def __init__(self, target: Target, input_words: int, output_tokens: int) -> None:
        self._target = target
        self._input_words = input_words
        self._output_tokens = output_tokens
        self._free: list[_Stream] = []

    async def first_token(self, number: int) -> float:
        """One request to its end; when its first token came. Raises FailedError."""
        stream = self._free.pop() if self._free else await self._connect()
        try:
            first_at = await stream.ask(self._request(number))
        except BaseException:
            stream.close()
            raise
        self._free.append(stream)
        return first_at

    async def closed_loop(self, streams: int, duration_s: float, numbers: Sequence[int]) -> float:
        """Answers per second with `streams` requests at a time for `duration_s`; prompts from `numbers`."""
        left = iter(numbers)
        done = 0
        begun = time.perf_counter()

        async def one_after_another() -> None:
            nonlocal done
            while time.perf_counter() < begun + duration_s:
                await self.first_token(next(left))
                done += 1

        await asyncio.gather(*(one_after_another() for _ in range(streams)))
        return done / (time.perf_counter() - begun)

    def close(self) -> None:
        """Closes all connections."""
        while self._free:
            self._free.pop().close()

    async def _connect(self) -> "_Stream":
        address = urlsplit(self._target.url)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(_Stream, address.hostname, address.port)
        return stream

    def _request(self, number: int) -> bytes:
        body = {
            "model": self._target.model,
            "messages": [{"role": "user", "content": prompt(number, self._input_words)}],
            "stream": True,
            "max_tokens": self._output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        return request(self._target, "/v1/chat/completions", body, keep_open=True)


class _Stream(asyncio.Protocol):
    """One connection: asks, and looks in what comes for the first token and for the end."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[float] | None = None
        self._first_at: float | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    async def ask(self, data: bytes) -> float:
        """Sends a request and waits for the end of its answer; when its first token came."""
        assert self._transport is not None
        if self._transport.is_closing():
            raise FailedError
        self._ended = asyncio.get_running_loop().create_future()
        self._first_at = None
        self._tail = b""
        self._transport.write(data)
        return await self._ended

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._ended is None or self._ended.done():
            return
        seen = self._tail + data
        if self._first_at is None and TOKEN.search(seen):
            self._first_at = now
        if seen.startswith(b"HTTP/1.1 ") and not seen.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(FailedError())
        elif seen.endswith(LAST_CHUNK):
            self._end()
        self._tail = seen[-TAIL_BYTES:]

    def _end(self) -> None:
        assert self._ended is not None
        if self._first_at is None:
            self._ended.set_exception(FailedError())
        else:
            self._ended.set_result(self._first_at)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(FailedError())

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.close()
