"""Limits counted in Redis, for several workers or hosts: one atomic script for each step, by Redis's clock.

A running request holds a lease in Redis that expires by itself unless it is renewed: what a worker that died
had reserved comes back, at the next request of the same tenant after `LEASE_S`. All of a tenant is in one
hash slot.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import structlog

from auth.limits import SECOND_US, Account, Answer, Demand, StoreUnavailable, refused
from auth.redis_line import Command, RedisLine
from metrics.limits import LimitMetrics

log = structlog.get_logger()

LEASE_S = 30
RETRY_S = 1.0
MAX_UNSETTLED = 10_000
"""Requests that ended while Redis was away, kept to be settled; further ones are left to their leases."""
PREFIX = "lapilli:limits:"
SCRIPTS = Path(__file__).parent / "lua"


@cache
def scripts() -> dict[str, str]:
    """The Lua sources by name, what they share put before each."""
    common = (SCRIPTS / "common.lua").read_text()
    return {name: common + (SCRIPTS / f"{name}.lua").read_text() for name in ("reserve", "settle", "renew")}


class RedisStore:
    """The store of several workers (see limits.Store)."""

    def __init__(
        self,
        url: str,
        metrics: LimitMetrics,
        *,
        timeout_s: float = 1.0,
        lease_s: float = LEASE_S,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`clock` stands in for Redis's own in tests. Raises ValueError for a bad URL."""
        self._line = RedisLine(url, scripts(), timeout_s=timeout_s, first=self._renewals)
        self._metrics = metrics
        self._lease_us = int(lease_s * SECOND_US)
        self._clock = clock
        self._open: dict[str, set[str]] = {}
        """Leases of requests that run here, by tenant."""
        self._unsettled: dict[str, Command] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """See limits.Store; the log has a failure."""
        with contextlib.suppress(StoreUnavailable):
            await self._line.open()

    async def reserve(
        self, account: Account, lease: str, demands: Sequence[Demand], *, output_tokens: int, pace_us: int
    ) -> list[Answer]:
        """See limits.Store."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        base = f"{PREFIX}{{{account.tenant}}}:"
        keys = [f"{base}open", f"{base}leases", f"{base}tenant", f"{base}key:{account.key_id}"]
        args: list[str | int] = [self._now(), lease, self._lease_us, output_tokens, pace_us]
        for scope, kind, limit, amount, enforced in demands:
            args += (3 if scope == "tenant" else 4, kind.code, limit, amount, int(enforced))
        leases = self._open.setdefault(account.tenant, set())
        known = lease in leases
        leases.add(lease)
        try:
            found = await self._line.run(("reserve", keys, args))
        except StoreUnavailable as error:
            if not known and not error.sent:
                self._forget(account.tenant, lease)
            raise
        answers = [
            Answer(bool(found[at]), found[at + 1], found[at + 2], found[at + 3])
            for at in range(0, len(found), 4)
        ]
        if not known and refused(demands, answers):
            self._forget(account.tenant, lease)
        return answers

    async def settle(self, account: Account, lease: str, used_tokens: int | None) -> None:
        """See limits.Store. Never raises: what can't be settled now is tried again until it can."""
        self._forget(account.tenant, lease)
        base = f"{PREFIX}{{{account.tenant}}}:"
        used = -1 if used_tokens is None else used_tokens
        command: Command = ("settle", [f"{base}open", f"{base}leases"], [lease, used])
        try:
            await self._line.run(command)
        except (StoreUnavailable, asyncio.CancelledError) as error:
            if len(self._unsettled) < MAX_UNSETTLED:
                self._unsettled[lease] = command
            else:
                self._metrics.settles_dropped.inc()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def close(self) -> None:
        """Settles what it can, then ends the connection."""
        if self._keeper is not None:
            self._keeper.cancel()
        with contextlib.suppress(StoreUnavailable):
            await self._settle_late()
        await self._line.close()

    def _forget(self, tenant: str, lease: str) -> None:
        leases = self._open.get(tenant)
        if leases is not None:
            leases.discard(lease)
            if not leases:
                del self._open[tenant]

    def _now(self) -> int:
        return self._clock() if self._clock is not None else 0

    def _renewals(self) -> Iterator[Command]:
        """Also the first thing on a new connection: a short absence of Redis costs no request its place."""
        for tenant, leases in list(self._open.items()):
            yield "renew", [f"{PREFIX}{{{tenant}}}:open"], [self._now(), self._lease_us, *leases]

    async def _keep(self) -> None:
        """Renews leases, and settles what could not be settled when it ended."""
        pause_s = min(RETRY_S, self._lease_us / SECOND_US / 3)
        since_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            since_s += pause_s
            with contextlib.suppress(StoreUnavailable):
                await self._settle_late()
                if since_s >= self._lease_us / SECOND_US / 3:
                    since_s = 0.0
                    for command in self._renewals():
                        await self._line.run(command)

    async def _settle_late(self) -> None:
        while self._unsettled:
            lease, command = next(iter(self._unsettled.items()))
            await self._line.run(command)
            self._unsettled.pop(lease, None)
