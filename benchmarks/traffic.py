"""Mixed traffic for the soak: good requests, bad input, clients that leave, clients that read slowly."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import WORDS
from benchmarks.wire import Connection, Target, connected, request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUEST_LIMIT_S = 120.0
SLOW_READ_S = 8.0
KILL_WINDOW_S = 10.0
"""Seconds after a worker's kill in which a cut connection or a 503 is put down to it."""
OUTAGE_WINDOW_S = 6.0
"""Seconds after Redis has been ended in which a 503 is put down to that."""
EXPLAINED = (" after kill", " without Redis")


@dataclass(frozen=True)
class Sizes:
    """Output tokens and prompt words of short and long requests."""

    short_tokens: int
    long_tokens: int
    long_words: int
    body_limit_bytes: int = 4 * 2**20
    context_tokens: int = 32768


@dataclass
class Seen:
    """What clients saw: outcomes by kind of request, when faults were made, samples of surprises."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    kills_at: list[float] = field(default_factory=list)
    outages_at: list[float] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str) -> None:
        """Counts one request; what is not `ok` shortly after a fault that explains it says so."""
        now = time.monotonic()
        if outcome != "ok":
            if any(0 <= now - at < KILL_WINDOW_S for at in self.kills_at) and outcome != "timeout":
                outcome += " after kill"
            elif any(0 <= now - at < OUTAGE_WINDOW_S for at in self.outages_at) and outcome == "status 503":
                outcome += " without Redis"
            elif len(self.surprises) < 20:
                self.surprises.append(f"{kind}: {outcome}")
        self.outcomes[kind, outcome] += 1

    def total(self, outcome: str | None = None) -> int:
        """Number of requests, or of those with `outcome`."""
        return sum(number for (_, seen), number in self.outcomes.items() if outcome in (None, seen))

    def unexplained(self) -> int:
        """Requests whose end is neither what was expected nor due to a fault that was made."""
        return sum(
            number
            for (_, outcome), number in self.outcomes.items()
            if outcome != "ok" and not outcome.endswith(EXPLAINED)
        )

    def table(self) -> dict[str, dict[str, int]]:
        """Counts by kind and outcome."""
        rows: dict[str, dict[str, int]] = {}
        for (kind, outcome), number in sorted(self.outcomes.items()):
            rows.setdefault(kind, {})[outcome] = number
        return rows


class Traffic:
    """Makes requests of all kinds until told to stop. An outcome is `ok`, or says what came instead."""

    def __init__(self, target: Target, sizes: Sizes, seed: int = 0) -> None:
        self._target = target
        self._sizes = sizes
        self._rng = random.Random(seed)
        self.seen = Seen()
        self._kinds = self._all_kinds()

    def _all_kinds(self) -> dict[str, tuple[int, Callable[[], Awaitable[str]]]]:
        """Each kind of request with its weight."""
        return {
            "chat_stream": (20, lambda: self._good(CHAT, stream=True)),
            "chat_stream_long": (8, lambda: self._good(CHAT, stream=True, long=True)),
            "chat_whole": (10, lambda: self._good(CHAT)),
            "completion_stream": (8, lambda: self._good(TEXT, stream=True)),
            "completion_whole": (5, lambda: self._good(TEXT)),
            "chat_n2_stream": (4, lambda: self._good(CHAT, stream=True, n=2, temperature=1)),
            "chat_n2_whole": (3, lambda: self._good(CHAT, n=2, temperature=1)),
            "chat_logprobs_stream": (4, lambda: self._good(CHAT, stream=True, logprobs=True, top_logprobs=2)),
            "completion_logprobs": (3, lambda: self._good(TEXT, logprobs=2)),
            "abort_close": (12, lambda: self._abort(Connection.close)),
            "abort_reset": (12, lambda: self._abort(Connection.reset)),
            "abort_whole": (5, self._abort_whole),
            "half_a_body": (3, self._half_a_body),
            "slow_reader": (3, self._slow_reader),
            "stalled_reader": (2, self._stalled_reader),
            "bad_json": (3, lambda: self._refused(CHAT, b'{"messages": [', 400)),
            "bad_field": (3, lambda: self._refused(CHAT, self._chat(temperature=-5), 400)),
            "bad_type": (2, lambda: self._refused(TEXT, self._text(max_tokens="many"), 400)),
            "no_messages": (2, lambda: self._refused(CHAT, {"model": self._target.model}, 400)),
            "too_long": (2, lambda: self._refused(TEXT, self._over_context(), 400)),
            "too_large": (1, self._too_large),
            "unknown_model": (2, lambda: self._refused(CHAT, self._chat(model="no-such-model"), 404)),
            "unknown_route": (1, lambda: self._refused("/v1/nothing", {}, 404)),
            "no_key": (2, lambda: self._refused(CHAT, self._chat(), 401, key=None)),
            "bad_key": (2, lambda: self._refused(CHAT, self._chat(), 401, key="lapilli_" + "x" * 43)),
            "models": (1, lambda: self._refused("/v1/models", b"", 200, method="GET")),
        }

    async def run(self, concurrency: int, until: asyncio.Event) -> None:
        """`concurrency` requests at a time; after `until` is set the running ones come to their end."""
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]

        async def one_after_another() -> None:
            while not until.is_set():
                (kind,) = self._rng.choices(names, weights)
                self.seen.note(kind, await self._one(kind))

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))

    async def _one(self, kind: str) -> str:
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                return await self._kinds[kind][1]()
        except TimeoutError:
            return "timeout"
        except (OSError, asyncio.IncompleteReadError) as error:
            await asyncio.sleep(0.05)  # a server that is gone is not to be asked in a tight loop
            return type(error).__name__

    def _words(self, number: int) -> str:
        return f"{self._rng.random():.9f} " + " ".join(self._rng.choice(WORDS) for _ in range(number))

    def _chat(self, *, long: bool = False, **fields: Any) -> dict[str, Any]:
        text = self._words(self._sizes.long_words if long else self._rng.randint(3, 30))
        return self._common(long) | {"messages": [{"role": "user", "content": text}]} | fields

    def _text(self, *, long: bool = False, **fields: Any) -> dict[str, Any]:
        return self._common(long) | {"prompt": self._words(self._rng.randint(3, 30))} | fields

    def _common(self, long: bool) -> dict[str, Any]:
        most = self._sizes.long_tokens if long else self._sizes.short_tokens
        return {
            "model": self._target.model,
            "max_tokens": self._rng.randint(max(1, most // 2), most),
            "ignore_eos": True,
            "temperature": self._rng.choice([0, 1]),
        }

    def _over_context(self) -> dict[str, Any]:
        """A short prompt that asks for more tokens than the context holds."""
        return self._text() | {"max_tokens": self._sizes.context_tokens * 2}

    async def _good(self, path: str, **fields: Any) -> str:
        body = self._chat(**fields) if path == CHAT else self._text(**fields)
        async with connected(self._target) as connection:
            await connection.send(request(self._target, path, body))
            status = await connection.status()
            if status != 200:
                return f"status {status}"
            answer = await connection.body()
        return stream_outcome(answer) if body.get("stream") else whole_outcome(answer, body.get("n", 1))

    async def _refused(
        self,
        path: str,
        body: bytes | dict[str, Any],
        expected: int,
        *,
        key: str | None = "",
        method: str = "POST",
    ) -> str:
        async with connected(self._target) as connection:
            await connection.send(request(self._target, path, body, key=key, method=method))
            status = await connection.status()
            await connection.body()
        return "ok" if status == expected else f"status {status}"

    async def _too_large(self) -> str:
        """A declared length over the limit; the server may close before the body is sent."""
        head = request(self._target, CHAT, b"").replace(
            b"Content-Length: 0", f"Content-Length: {self._sizes.body_limit_bytes + 1}".encode()
        )
        async with connected(self._target) as connection:
            await connection.send(head)
            status = await connection.status()
        return "ok" if status == 413 else f"status {status}"

    async def _abort(self, end: Callable[[Connection], None]) -> str:
        """Leaves in the middle of a long stream."""
        async with connected(self._target) as connection:
            await connection.send(request(self._target, CHAT, self._chat(stream=True, long=True)))
            status = await connection.status()
            if status == 200:
                for _ in range(self._rng.randint(1, 12)):
                    if not await connection.reader.readline():
                        return "cut"
            end(connection)
        return "ok" if status == 200 else f"status {status}"

    async def _abort_whole(self) -> str:
        """Leaves before the answer of a request that is not streamed."""
        async with connected(self._target) as connection:
            await connection.send(request(self._target, CHAT, self._chat(long=True)))
            await asyncio.sleep(self._rng.random())
            connection.reset()
        return "ok"

    async def _half_a_body(self) -> str:
        """Leaves while sending."""
        data = request(self._target, CHAT, self._chat())
        async with connected(self._target) as connection:
            await connection.send(data[: len(data) - self._rng.randint(1, 40)])
            await asyncio.sleep(self._rng.random())
        return "ok"

    async def _slow_reader(self) -> str:
        """Reads a few bytes at a time through a small buffer, then leaves."""
        async with connected(self._target, receive_bytes=2048) as connection:
            await connection.send(request(self._target, CHAT, self._chat(stream=True, long=True)))
            status = await connection.status()
            ends_at = time.monotonic() + SLOW_READ_S
            while status == 200 and time.monotonic() < ends_at:
                if not await connection.reader.read(200):
                    break
                await asyncio.sleep(0.05)
        return "ok" if status == 200 else f"status {status}"

    async def _stalled_reader(self) -> str:
        """Sends a request and reads nothing for a while, then resets."""
        async with connected(self._target, receive_bytes=2048) as connection:
            await connection.send(request(self._target, CHAT, self._chat(stream=True, long=True)))
            await asyncio.sleep(SLOW_READ_S / 2)
            connection.reset()
        return "ok"


def stream_outcome(answer: bytes) -> str:
    """`ok` for a stream that came to its end."""
    if b'data: {"error"' in answer:
        return "error event"
    return "ok" if b"data: [DONE]" in answer else "cut"


def whole_outcome(answer: bytes, num_choices: int) -> str:
    """`ok` for a JSON answer with all its choices."""
    try:
        choices = json.loads(answer)["choices"]
    except (ValueError, KeyError):
        return "cut"
    return "ok" if len(choices) == num_choices else f"{len(choices)} choices"
