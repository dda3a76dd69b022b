"""The soak's Redis, which comes and goes, and the check that every reservation has come back."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from auth.limits_redis import LEASE_S, PREFIX
from benchmarks.redis_server import RedisServer
from benchmarks.soak_checks import Check
from benchmarks.traffic import Seen

DOWN_S = 2.0
BACK_LIMIT_S = LEASE_S + 15.0
"""What a killed worker had reserved comes back when its leases have run out."""


class LimitStore:
    """Redis for the server's limits, which keeps what it holds over a restart."""

    def __init__(self, folder: Path) -> None:
        self._redis = RedisServer(folder, durable=True)
        self.restarts = 0

    def flags(self) -> list[str]:
        """For `lapilli serve`: limits of every kind, none of which this traffic reaches."""
        limits = {"parallel_requests": 10**4, "requests_per_min": 10**6, "tokens_per_min": 10**9}
        limits |= {"tokens_per_day": 10**11}
        named = [flag for name, value in limits.items() for flag in (f"--limits.{name}", str(value))]
        return ["--limits.store", "redis", "--limits.redis_url", self._redis.url, *named]

    async def keep_restarting(self, every_s: float, seen: Seen) -> None:
        """Ends Redis for DOWN_S seconds, now and then; it runs when this is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            seen.outages_at.append(time.monotonic())
            restart = asyncio.create_task(self._restart())
            try:
                await asyncio.shield(restart)
            finally:
                await restart

    async def _restart(self) -> None:
        await asyncio.to_thread(self._redis.end)
        self.restarts += 1
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(self._redis.start)

    async def check(self, canary: Callable[[], Awaitable[str]]) -> Check:
        """Nothing is held for a request; a request of the tenant is what has dead leases swept up."""
        began = time.monotonic()
        while True:
            await canary()
            held = await asyncio.to_thread(self._held)
            waited_s = time.monotonic() - began
            if not any(held.values()) or waited_s > BACK_LIMIT_S:
                break
            await asyncio.sleep(1)
        shown = ", ".join(f"{name} {number}" for name, number in held.items())
        what = f"{shown} after {waited_s:.0f} s ({self.restarts} restarts of Redis)"
        return Check("reservations", not any(held.values()), what)

    def close(self) -> None:
        """Ends Redis."""
        self._redis.close()

    def _held(self) -> dict[str, int]:
        client = self._redis.client
        scopes = [*client.scan_iter(f"{PREFIX}*:tenant"), *client.scan_iter(f"{PREFIX}*:key:*")]
        return {
            "open": sum(client.zcard(key) for key in client.scan_iter(f"{PREFIX}*:open")),
            "leases": sum(client.hlen(key) for key in client.scan_iter(f"{PREFIX}*:leases")),
            "places": sum(int(client.hget(key, "pr:n") or 0) for key in scopes),
        }
