"""Closed-loop load over raw sockets: many streams, little client work, so that the client is not measured."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop

TEXT = "the river moved slowly past old stone houses while people talked about weather and bread"
WORDS = TEXT.split(" ")


@dataclass
class StreamResult:
    """One stream: times in seconds since its request was sent."""

    status: int = 0
    done: bool = False
    tokens: int = 0
    frames: int = 0
    started_at: float = 0.0
    """Seconds of the machine's monotonic clock, the same in all processes."""
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and self.done


@dataclass(frozen=True)
class Load:
    """What to send: `streams` at a time, `requests` in all, `input_words` in and `output_tokens` out."""

    url: str
    key: str
    model: str
    streams: int
    requests: int
    input_words: int
    output_tokens: int
    first_number: int = 0
    """Number of the first request; equal numbers are equal prompts."""
    limit_s: float = 300.0
    """Seconds a request may take."""


def run(load: Load) -> list[StreamResult]:
    """Sends the load and returns one result for each request."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load))


async def _run(load: Load) -> list[StreamResult]:
    results: list[StreamResult] = []
    numbers = iter(range(load.first_number, load.first_number + load.requests))

    async def one_after_another() -> None:
        for number in numbers:
            results.append(await _stream(load, number))

    await asyncio.gather(*(one_after_another() for _ in range(load.streams)))
    return results


def _request(load: Load, number: int) -> bytes:
    rng = random.Random(number)
    text = f"{number} " + " ".join(rng.choice(WORDS) for _ in range(load.input_words))
    body = json.dumps(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(load.url).netloc}\r\n"
        f"Authorization: Bearer {load.key}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _stream(load: Load, number: int) -> StreamResult:
    address = urlsplit(load.url)
    request = _request(load, number)
    reader = _Reader()
    reader.result.started_at = reader.last = time.perf_counter()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(load.limit_s):
            loop = asyncio.get_running_loop()
            host, port = str(address.hostname), int(address.port or 80)
            transport, _ = await loop.create_connection(lambda: reader, host, port)
            transport.write(request)
            await reader.ended.wait()
    except (OSError, TimeoutError) as error:
        reader.result.error = reader.result.error or type(error).__name__
    finally:
        if transport is not None:
            transport.close()
    reader.result.total_s = time.perf_counter() - reader.result.started_at
    return reader.result


class _Reader(asyncio.Protocol):
    """Reads one streamed answer, with one look at the clock for all that arrives together."""

    def __init__(self) -> None:
        self.result = StreamResult()
        self.ended = asyncio.Event()
        self.last = 0.0
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line, now)
            elif not self.result.status and line.startswith(b"HTTP/"):
                self.result.status = int(line.split()[1])

    def _event(self, line: bytes, now: float) -> None:
        result = self.result
        if line.startswith(b"data: [DONE]"):
            result.done = True
        elif b'"usage":{' in line:
            result.tokens = json.loads(line[5:])["usage"]["completion_tokens"]
        elif b'"content":"' in line and b'"content":""' not in line:
            if result.ttft_s is None:
                result.ttft_s = now - result.started_at
            else:
                result.gaps_s.append(now - self.last)
            self.last = now
            result.frames += 1
        elif line.startswith((b'data: {"error"', b'data:{"error"')):
            result.error = line[:200].decode(errors="replace")

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.result.error = self.result.error or type(error).__name__
        self.ended.set()
