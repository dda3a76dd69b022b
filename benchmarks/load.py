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
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """What to send: `streams` at a time, `requests` in all, `input_words` in and `output_tokens` out."""

    url: str
    key: str
    streams: int
    requests: int
    input_words: int
    output_tokens: int


def run(load: Load) -> list[StreamResult]:
    """Sends the load and returns one result for each request."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load))


async def _run(load: Load) -> list[StreamResult]:
    results: list[StreamResult] = []
    numbers = iter(range(load.requests))

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
    result = StreamResult()
    started = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
    try:
        writer.write(_request(load, number))
        result.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            if line.startswith(b"data: [DONE]"):
                result.done = True
            elif b'"usage":{' in line:
                result.tokens = json.loads(line[5:])["usage"]["completion_tokens"]
            elif b'"content":"' in line and b'"content":""' not in line:
                now = time.perf_counter()
                if result.ttft_s is None:
                    result.ttft_s = now - started
                else:
                    result.gaps_s.append(now - last)
                last = now
                result.frames += 1
    finally:
        writer.close()
    result.total_s = time.perf_counter() - started
    return result


def percentile_ms(values_s: list[float], share: float) -> float | None:
    """The `share` (0 to 1) quantile in milliseconds; None of nothing."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)
