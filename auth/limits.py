"""Limits of tenants and keys: what they are, what a request asks of them, and what a store answers.

A limit holds in a *scope*, a tenant or one of its keys. Kinds of one request:

- over a sliding window (requests per second and minute, tokens per minute): what was admitted within any one
  window never exceeds the limit. A request counts at the moment it was admitted, whenever it ends;
- at the same time (parallel requests);
- by calendar day and month, UTC (the token budget).

Tokens are reserved at their worst case (prompt and all output allowed) and lowered to the real use at the
end. Where counts are kept: limits_memory.py, limits_redis.py. Times are integers: microseconds since 1970.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import NamedTuple, Protocol

SECOND_US = 1_000_000
DAY_US = 86_400 * SECOND_US

EXACT_ENTRIES = 256
"""A window keeps so many admissions one by one; above that, those within a 64th of it are put together, at
the time of the last: never more than the limit, at most 1.6 % less."""
WINDOW_SHARES = 64
MAX_PARALLEL_WAIT_US = 30 * SECOND_US
"""Longest wait told for parallel requests: clients that leave early free their places sooner."""


class Unit(Enum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of limit; `name` is the field of `Limits`, `code` its short name in a store."""

    name: str
    code: str
    unit: Unit
    window_us: int = 0
    period: str = ""
    """`day` or `month`."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("requests_per_s", "rs", Unit.REQUESTS, window_us=SECOND_US),
        Kind("requests_per_min", "rm", Unit.REQUESTS, window_us=60 * SECOND_US),
        Kind("tokens_per_min", "tm", Unit.TOKENS, window_us=60 * SECOND_US),
        Kind("parallel_requests", "pr", Unit.PARALLEL),
        Kind("tokens_per_day", "td", Unit.TOKENS, period="day"),
        Kind("tokens_per_month", "tM", Unit.TOKENS, period="month"),
    )
}


class Account(NamedTuple):
    """Whose limits: a tenant, and the key it calls with."""

    tenant: str
    key_id: str


class Demand(NamedTuple):
    """What a request asks of one limit. Not enforced (shadow): counted, and refused to nobody."""

    scope: str
    """`tenant` or `key`."""
    kind: Kind
    limit: int
    amount: int
    enforced: bool = True


class Answer(NamedTuple):
    """What a store says to one demand."""

    over: bool
    """Whether the limit does not allow it; if any enforced demand is over, nothing at all was reserved."""
    wait_us: int
    """When it is over: how long until it would be allowed, if nothing else comes; -1: never."""
    remaining: int
    reset_us: int
    """How long until the whole limit is there again, if nothing else comes."""


class StoreUnavailable(Exception):
    """The store can't be asked now. `sent`: it may have done all the same what it was asked for."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class Store(Protocol):
    """Keeps the counts. Each method is atomic. Memory and Redis answer alike; a test holds them together."""

    async def reserve(
        self, account: Account, lease: str, demands: Sequence[Demand], *, output_tokens: int, pace_us: int
    ) -> list[Answer]:
        """Reserves all of `demands` for the request `lease`, on top of what it holds, or nothing.

        Without demands it only notes the output tokens of a request that holds something.

        `output_tokens` is the request's longest possible answer (0: not known yet), `pace_us` the time per
        output token at present: they tell when a place for a parallel request must become free.
        """
        ...

    async def settle(self, account: Account, lease: str, used_tokens: int | None) -> None:
        """Ends the request `lease`: tokens are lowered to the use, its place is free; again is no error.

        None: the engine never saw it, so it counts nowhere.
        """
        ...

    async def open(self) -> None:
        """Connects ahead of the first request; no error where that fails: a later one tries again."""
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


def refused(demands: Sequence[Demand], answers: Sequence[Answer]) -> bool:
    """Whether the store reserved nothing."""
    return any(answer.over and demand.enforced for demand, answer in zip(demands, answers, strict=True))


_START_US = time.time_ns() // 1000 - time.monotonic_ns() // 1000


def now_us() -> int:
    """Microseconds since 1970, by a clock that never jumps."""
    return _START_US + time.monotonic_ns() // 1000


def period_of(kind: Kind, now: int) -> tuple[int, int]:
    """Number of the calendar day or month that `now` is in (UTC), and the moment it ends."""
    if kind.period == "day":
        day = now // DAY_US
        return day, (day + 1) * DAY_US
    moment = datetime.fromtimestamp(now // SECOND_US, UTC)
    first = moment.replace(day=1, hour=0, minute=0, second=0)
    after = (first + timedelta(days=32)).replace(day=1)
    return moment.year * 12 + moment.month - 1, int(after.timestamp()) * SECOND_US
