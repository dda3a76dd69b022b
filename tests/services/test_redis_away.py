"""Redis that dies, hangs, forgets its scripts: every call ends, nothing is lost, nothing is started anew."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from auth.limits import KINDS, SECOND_US, Account, Demand, StoreUnavailable
from auth.limits_redis import RedisStore
from metrics.limits import LimitMetrics
from tests.conftest import free_port, redis_server

WHO = Account("tenant", "key")
ONE = Demand("tenant", KINDS["parallel_requests"], 1, 1)


def _store(url: str, *, timeout_s: float = 20, clock: Callable[[], int] | None = None) -> RedisStore:
    return RedisStore(url, LimitMetrics(CollectorRegistry()), timeout_s=timeout_s, clock=clock)


async def _takes(store: RedisStore, lease: str) -> bool:
    """Whether `lease` gets the only place."""
    (answer,) = await store.reserve(WHO, lease, [ONE], output_tokens=0, pace_us=0)
    return not answer.over


async def _until_it_raises(store: RedisStore) -> None:
    while True:
        await _takes(store, "c")


async def _until(check: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if await check():
                return
        except StoreUnavailable:
            pass
        await asyncio.sleep(0.05)
    pytest.fail("not within 20 s")


def test_restarted(tmp_path: Path) -> None:
    """A Redis that starts again, empty, is used at once; what ended meanwhile settles without harm."""

    async def run() -> None:
        port = free_port()
        with redis_server(tmp_path, port) as (url, _):
            store = _store(url)
            assert await _takes(store, "a")
        with pytest.raises(StoreUnavailable):
            await _takes(store, "b")
        await store.settle(WHO, "a", 1)
        with redis_server(tmp_path, port):
            await _until(lambda: _takes(store, "c"))
            await store.settle(WHO, "c", 1)
            assert await _takes(store, "d")
            await store.close()

    asyncio.run(run())


def test_hanging(tmp_path: Path) -> None:
    """No call waits longer than it may; what ended during the hang gives its place back after it."""

    async def run() -> None:
        with redis_server(tmp_path) as (url, process):
            store = _store(url, timeout_s=0.5)
            await _until(lambda: _takes(store, "a"))
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable) as raised:
                await _takes(store, "b")
            assert raised.value.sent
            await asyncio.gather(store.settle(WHO, "a", 1), store.settle(WHO, "b", None))
            assert set(store._unsettled) == {"a", "b"}
            process.send_signal(signal.SIGCONT)
            await _until(lambda: _takes(store, "c"))
            await store.close()

    asyncio.run(run())


def test_scripts_forgotten_and_connection_killed(redis_url: str) -> None:
    """SCRIPT FLUSH costs nothing; after a cut connection running requests keep their places."""

    async def run() -> None:
        clock = [1_790_000_000 * SECOND_US]
        other = redis.Redis.from_url(redis_url)
        store = _store(redis_url, clock=lambda: clock[0])
        assert await _takes(store, "a")
        other.script_flush()
        assert not await _takes(store, "b")
        for client in other.client_list(_type="normal"):
            if client["cmd"].startswith("evalsha"):
                other.client_kill_filter(_id=client["id"])
        clock[0] += 60 * SECOND_US  # the lease of "a" is over, but for the renewal that comes first
        with pytest.raises(StoreUnavailable):
            await _until_it_raises(store)
        await _until(lambda: _refused(store))
        await store.settle(WHO, "a", 0)
        assert await _takes(store, "d")
        await store.settle(WHO, "d", 0)
        await store.close()

    async def _refused(store: RedisStore) -> bool:
        return not await _takes(store, "c")

    asyncio.run(run())


def test_too_many_to_settle_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded while Redis is away."""
    monkeypatch.setattr("auth.limits_redis.MAX_UNSETTLED", 3)

    async def run() -> None:
        store = _store("redis://127.0.0.1:1/0", timeout_s=1)
        for number in range(5):
            await store.settle(WHO, str(number), 1)
        assert len(store._unsettled) == 3
        assert store._metrics.settles_dropped._value.get() == 2
        await store.close()

    asyncio.run(run())
