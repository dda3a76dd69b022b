"""The limits' door in the application, in process: answers, headers, what is given back.

Keys and engine are stand-ins; layers, routes, limiter and store are the server's own. Time is moved, not
waited for.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from auth.audit import AuditLog
from auth.limiter import Limiter, duration
from auth.limits import SECOND_US
from auth.limits_memory import MemoryStore
from auth.limits_redis import RedisStore
from auth.principal import Limits, Principal
from auth.services import Offer, Services
from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics
from server.app import create_app
from server.audit_sections import AuditSettings
from server.auth_sections import LimitsSettings
from server.config import Settings
from server.context import RequestContext
from server.errors import ApiError
from server.gateway import Gateway
from server.limits import take_tokens

CHAT = "/v1/chat/completions"
START_US = 1_790_000_000 * SECOND_US
PROMPT, OUTPUT = 10, 20


class Door:
    """An application whose engine answers as the test says, and a client of it."""

    def __init__(self, store: Any, clock: list[int], client: httpx.AsyncClient, limiter: Limiter) -> None:
        self.store = store
        self.clock = clock
        self.client = client
        self.limiter = limiter
        self.principal = Principal("t", "k", "k")
        self.fails: ApiError | None = None
        """Raised in the place of an answer, before the engine has seen the request."""
        self.holds: asyncio.Event | None = None
        """Waited for before the answer."""
        self.num_used = PROMPT + 5

    async def chat(self, body: bytes, ctx: RequestContext) -> bytes:
        """In the place of the protocol."""
        if self.fails is not None:
            raise self.fails
        await take_tokens(ctx, PROMPT, OUTPUT, OUTPUT)
        if self.holds is not None:
            await self.holds.wait()
        ctx.prompt_tokens, ctx.completion_tokens = PROMPT, self.num_used - PROMPT
        return b"{}"

    async def ask(self, body: bytes = b"{}") -> httpx.Response:
        """One chat request."""
        return await self.client.post(
            CHAT, content=body, headers={"Authorization": "Bearer x", "Content-Type": "application/json"}
        )

    def limit(self, **limits: int | None) -> None:
        """From now on the tenant has these limits, and no others."""
        self.principal = Principal("t", "k", "k", tenant_limits=Limits(**{"requests_per_s": None} | limits))

    def count(self, name: str, limit: str) -> float | None:
        """A metric's value for one kind of limit."""
        registry = self.limiter.metrics.registry
        return registry.get_sample_value(f"lapilli_{name}_total", {"limit": limit})


@asynccontextmanager
async def door(
    store: str = "memory", url: str = "redis://127.0.0.1:1/0", **options: Any
) -> AsyncIterator[Door]:
    """A door over the named store, with a clock of its own (Redis: its server's)."""
    clock = [START_US]
    limits = LimitsSettings(store=store, redis_url=url, requests_per_s=None, **options)
    metrics = LimitMetrics(CollectorRegistry())
    stores = {
        "memory": lambda: MemoryStore(lambda: clock[0]),
        "redis": lambda: RedisStore(url, metrics, timeout_s=20),
    }
    limiter = Limiter(limits, metrics, stores[store]())
    requests = RequestMetrics("m")
    holder: list[Door] = []

    async def identify(_headers: Any, _service: Any) -> Principal:
        return holder[0].principal

    gateway = Gateway(
        Settings(),
        SimpleNamespace(identify=identify),  # type: ignore[arg-type]
        Services(None, Offer(("m",), tokens=False)),
        requests,
        AuditLog(AuditSettings(), "worker-1"),
        SimpleNamespace(ready=True, reason=None, track=lambda _ctx: None),  # type: ignore[arg-type]
        limiter,
    )
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        holder.append(Door(limiter.store, clock, client, limiter))
        gateway.protocol = SimpleNamespace(chat=holder[0].chat)  # type: ignore[assignment]
        yield holder[0]
    await limiter.close()


def check_429(answer: httpx.Response, code: str = "rate_limit_exceeded") -> int:
    """An OpenAI-style refusal; returns its Retry-After in seconds."""
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, "rate_limit_error")
    retry = answer.headers["retry-after"]
    assert retry.isdecimal()
    assert 1 <= int(retry) <= 120
    return int(retry)


@pytest.mark.parametrize(
    ("limits", "window_s"),
    [({"requests_per_s": 10}, 1), ({"requests_per_min": 10}, 60), ({"tokens_per_min": 10 * 15}, 60)],
)
def test_a_retry_after_the_told_time_is_admitted(limits: dict[str, int], window_s: int) -> None:
    """Case O15: whole seconds, at most the window, never too few; ten rounds at odd moments."""

    async def run() -> None:
        async with door() as at:
            at.limit(**limits)
            for turn in range(10):
                while (answer := await at.ask()).status_code == 200:
                    at.clock[0] += (turn * 7 + 1) * 1000
                retry_s = check_429(answer)
                assert retry_s <= window_s
                unit = "tokens" if "tokens_per_min" in limits else "requests"
                assert int(answer.headers[f"x-ratelimit-remaining-{unit}"]) < (30 if unit == "tokens" else 1)
                at.clock[0] += retry_s * SECOND_US
                again = await at.ask()
                assert again.status_code == 200
                assert int(again.headers[f"x-ratelimit-limit-{unit}"]) == next(iter(limits.values()))
                at.clock[0] += turn * 7_919_000

    asyncio.run(run())


def test_parallel_requests_come_back_on_every_path() -> None:
    """Case O13: after each kind of end the only place is free at once, and nothing is counted wrongly."""

    async def run() -> None:
        async with door() as at:
            at.limit(parallel_requests=1, requests_per_min=1000, tokens_per_day=10_000)
            ends = [
                ApiError(400, "bad", code="invalid_value"),
                ApiError(404, "unknown model", code="model_not_found"),
                ApiError(400, "too long", code="context_length_exceeded"),
                ApiError(503, "the engine has stopped"),
                ApiError(500, "broken"),
            ]
            for _ in range(20):
                for end in ends:
                    at.fails = end
                    assert (await at.ask()).status_code == end.status
                    at.fails = None
                    assert (await at.ask()).status_code == 200
            last = await at.ask()
            # Only what the engine saw is counted, at its real use.
            assert last.headers["x-ratelimit-remaining-requests"] == str(1000 - 101)
            assert last.headers["x-ratelimit-remaining-tokens"] == str(
                10_000 - 100 * at.num_used - PROMPT - OUTPUT
            )
            assert at.limiter.metrics.open._value.get() == 0

    asyncio.run(run())


def test_cancelled_requests_give_back_what_they_held() -> None:
    """A request that is cancelled while the engine works, or waits for its turn."""

    async def run() -> None:
        async with door() as at:
            at.limit(parallel_requests=3)
            at.holds = asyncio.Event()
            for _ in range(5):
                running = [asyncio.ensure_future(at.ask()) for _ in range(3)]
                while len(at.limiter.open) < 3:
                    await asyncio.sleep(0)
                assert check_429(await at.ask()) >= 1
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await asyncio.sleep(0)
                assert not at.limiter.open
            at.holds = None
            assert (await at.ask()).status_code == 200

    asyncio.run(run())


def test_a_budget_is_a_quota_and_too_much_is_hopeless() -> None:
    """`insufficient_quota` with the end of the period; clients are told not to wait for what can't come."""

    async def run() -> None:
        async with door() as at:
            at.limit(tokens_per_day=40)
            assert (await at.ask()).status_code == 200
            answer = await at.ask()
            check_429(answer, "insufficient_quota")
            assert answer.headers["x-should-retry"] == "false"
            at.limit(tokens_per_min=PROMPT + OUTPUT - 1)
            answer = await at.ask()
            check_429(answer)
            assert answer.headers["x-should-retry"] == "false"
            assert "whole limit" in answer.json()["error"]["message"]
            at.limit(tokens_per_min=PROMPT + OUTPUT)
            assert (await at.ask()).status_code == 200
            assert "x-should-retry" not in (await at.ask()).headers

    asyncio.run(run())


def test_the_keys_own_limit_holds_too() -> None:
    """The smaller of both refuses; the tenant's other key goes on."""

    async def run() -> None:
        async with door() as at:
            tenant, key = Limits(requests_per_min=3), Limits(requests_per_min=2)
            at.principal = Principal("t", "k", "k", tenant_limits=tenant, key_limits=key)
            assert [(await at.ask()).status_code for _ in range(3)] == [200, 200, 429]
            at.principal = Principal("t", "other", "other", tenant_limits=tenant, key_limits=key)
            assert [(await at.ask()).status_code for _ in range(2)] == [200, 429]

    asyncio.run(run())


def test_shadow_refuses_nobody_and_counts() -> None:
    """A shadow limit shows in its metric alone: no 429, no header."""

    async def run() -> None:
        async with door(shadow=("requests_per_min",)) as at:
            at.limit(requests_per_min=2, parallel_requests=1)
            answers = [await at.ask() for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 5
            assert "x-ratelimit-limit-requests" not in answers[-1].headers
            assert at.count("limits_shadow", "requests_per_min") == 3
            assert at.count("rate_limited", "requests_per_min") is None

    asyncio.run(run())


@pytest.mark.parametrize("fail_open", [False, True])
def test_redis_away(fail_open: bool) -> None:
    """Closed by default: 503 with Retry-After. Open: served. Either way it is counted."""

    async def run() -> None:
        async with door("redis", fail_open=fail_open) as at:  # nothing listens there
            at.limit(requests_per_min=1)
            for _ in range(2):
                answer = await at.ask()
                assert answer.status_code == (200 if fail_open else 503)
                assert fail_open or int(answer.headers["retry-after"]) >= 1
            errors = at.limiter.metrics.registry.get_sample_value("lapilli_limits_store_errors_total")
            assert errors == 2

    asyncio.run(run())


def test_limits_over_redis(redis_url: str) -> None:
    """The same door over Redis: a burst is exact, and a client that goes on at once finds its place free."""

    async def run() -> None:
        async with door("redis", redis_url) as at:
            at.limit(parallel_requests=1)
            assert [(await at.ask()).status_code for _ in range(30)] == [200] * 30
            at.fails = ApiError(400, "bad")
            assert [(await at.ask()).status_code for _ in range(30)] == [400] * 30
            at.fails = None
            at.limit(requests_per_min=10)
            at.principal = Principal("burst", "k", "k", tenant_limits=at.principal.tenant_limits)
            answers = await asyncio.gather(*(at.ask() for _ in range(50)))
            assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 40

    asyncio.run(run())


def test_the_body_limit_is_the_callers() -> None:
    """Case O20: a tenant's own limit, larger or smaller than the server's, declared and chunked."""

    async def run() -> None:
        mib = 2**20

        async def chunks(size: int) -> AsyncIterator[bytes]:
            for _ in range(size // 2**16 + 1):
                yield b" " * 2**16

        async with door() as at:
            for limit in (mib, 6 * mib):
                at.limit(max_body_bytes=limit)
                assert (await at.ask(b" " * limit)).status_code == 200
                for body in (b" " * (limit + 1), chunks(limit)):
                    answer = await at.ask(body)  # type: ignore[arg-type]
                    assert answer.status_code == 413
                    assert str(limit) in answer.json()["error"]["message"]
            at.limit()
            assert (await at.ask(b" " * (4 * mib + 1))).status_code == 413

    asyncio.run(run())


def test_the_store_is_never_asked_without_limits() -> None:
    """`store: none`, and a tenant without limits: no header, no count."""

    async def run() -> None:
        metrics = LimitMetrics(CollectorRegistry())
        assert Limiter(LimitsSettings(store="none"), metrics).store is None
        async with door("redis") as at:
            at.limit()
            answer = await at.ask()
            assert answer.status_code == 200
            assert not [name for name in answer.headers if "ratelimit" in name]

    asyncio.run(run())


def test_settings_are_the_limits_of_tenants_that_set_none() -> None:
    """A tenant's own value wins; a key is never given the defaults of tenants."""
    settings = LimitsSettings(requests_per_s=500, tokens_per_min=1000, max_output_tokens=50)
    limiter = Limiter(settings, LimitMetrics(CollectorRegistry()))

    def limits(tenant: Limits, key: Limits = Limits()) -> dict[str, tuple[str, int]]:  # noqa: B008
        plan = limiter.plan(tenant, key)
        return {item.kind.name: (item.scope, item.limit) for item in (*plan.requests, *plan.tokens)}

    assert limits(Limits()) == {"requests_per_s": ("tenant", 500), "tokens_per_min": ("tenant", 1000)}
    own = limits(Limits(requests_per_s=None, tokens_per_min=7), Limits(requests_per_s=20))
    assert own == {"requests_per_s": ("key", 20), "tokens_per_min": ("tenant", 7)}
    assert limiter.plan(Limits(), Limits(max_output_tokens=9)).max_output_tokens == 9


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0s"), (1, "1ms"), (20_000, "20ms"), (999_001, "1s"), (1_500_000, "1.5s"), (8_640_000, "8.64s"),
        (60_000_000, "1m0s"), (360_000_000, "6m0s"), (86_399_999_000, "23h59m59.999s"),
    ],
)  # fmt: skip
def test_reset_is_spelled_as_openai_does(microseconds: int, text: str) -> None:
    """Go's durations, rounded up to the millisecond."""
    assert duration(microseconds) == text
