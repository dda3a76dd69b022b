"""The door of a worker: each generation request passes it in two steps, and leaves it in one.

1. `Reservation.admit`, before the body is read: requests per second and minute, parallel requests.
2. `Reservation.take_tokens`, when the prompt is tokenised and before the engine sees it: tokens, at their
   worst case.
3. `Reservation.settle`, however it ends: tokens are lowered to the real use. A request that the engine never
   saw (bad input, refused by another limit, gone before) counts nowhere.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import structlog

from auth.limits import (
    KINDS,
    SECOND_US,
    Account,
    Answer,
    Demand,
    Kind,
    Store,
    StoreUnavailable,
    Unit,
    refused,
)
from auth.limits_memory import MemoryStore
from auth.limits_redis import RedisStore
from auth.principal import DEFAULT_LIMITS, Limits, Principal
from metrics.limits import LimitMetrics
from server.auth_sections import LimitsSettings
from server.context import RequestContext

log = structlog.get_logger()

MAX_RETRY_AFTER_S = 120
"""What OpenAI's clients wait at most; only a budget can ask for more."""
FIRST_PACE_S = 0.05
"""Assumed time per output token until one has been seen."""
CLOSE_LIMIT_S = 5.0
HEADER_NAMES = {
    unit: [f"x-ratelimit-{what}-{unit.value}" for what in ("limit", "remaining", "reset")]
    for unit in (Unit.REQUESTS, Unit.TOKENS)
}
"""As OpenAI spells them."""


class LimitExceeded(Exception):
    """A limit refuses the request."""

    def __init__(self, demand: Demand, answer: Answer) -> None:
        super().__init__(demand.kind.name)
        self.demand = demand
        self.answer = answer

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, 1 to 120, after which it would be admitted if nothing else came."""
        if self.answer.wait_us < 0:
            return 60
        return min(MAX_RETRY_AFTER_S, max(1, ceil(self.answer.wait_us / SECOND_US)))

    @property
    def hopeless(self) -> bool:
        """Whether waiting is no use: more than the whole limit was asked for, or a budget is used up."""
        return self.answer.wait_us < 0 or self.answer.wait_us > MAX_RETRY_AFTER_S * SECOND_US


@dataclass(frozen=True, slots=True)
class Plan:
    """The limits that hold for one pair of tenant and key."""

    requests: tuple[Demand, ...]
    """What each request asks for, in full."""
    tokens: tuple[Demand, ...]
    """The same with an amount of 0: it is known later."""
    parallel: bool
    max_output_tokens: int | None
    most_tokens: int | None
    """A request of more tokens could never pass."""


class Limiter:
    """Makes the reservations of one worker and outlives them all."""

    def __init__(self, settings: LimitsSettings, metrics: LimitMetrics, store: Store | None = None) -> None:
        """`store` stands in for the one that the settings name."""
        self.metrics = metrics
        self.store = store or _store(settings, metrics)
        self.fail_open = settings.fail_open
        self.open: set[Reservation] = set()
        self._settings = settings
        self._pace_s: float | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self.plan = lru_cache(maxsize=4096)(self._plan)

    def reservation(self, ctx: RequestContext, principal: Principal) -> "Reservation | None":
        """A reservation that holds nothing yet; None where limits are off."""
        if self.store is None:
            return None
        plan = self.plan(principal.tenant_limits, principal.key_limits)
        return Reservation(self, self.store, ctx, Account(principal.tenant, principal.key_id), plan)

    async def open_store(self) -> None:
        """Connects the store ahead of the first request."""
        if self.store is not None:
            await self.store.open()

    def settle_soon(self, reservation: "Reservation") -> None:
        """Settles beside all else; `close` waits for it."""
        if not reservation.settled:
            self.spawn(reservation.settle())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work on the store that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def close(self) -> None:
        """Settles what has ended, then lets go of the store."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=CLOSE_LIMIT_S)
        if self.store is not None:
            await self.store.close()

    @property
    def pace_us(self) -> int:
        """Time per output token: a mean over requests that ended, newer ones weigh more."""
        if self._pace_s is None:
            seen = [pace for item in self.open if (pace := item.ctx.tpot_s) is not None]
            return int((min(seen) if seen else FIRST_PACE_S) * SECOND_US)
        return int(self._pace_s * SECOND_US)

    def note_pace(self, tpot_s: float | None) -> None:
        """A request has ended with this time per output token in seconds."""
        if tpot_s is not None:
            self._pace_s = tpot_s if self._pace_s is None else 0.8 * self._pace_s + 0.2 * tpot_s

    def _plan(self, tenant: Limits, key: Limits) -> Plan:
        scopes = (("tenant", with_defaults(tenant, self._settings)), ("key", _own(key)))
        demands = []
        for kind in KINDS.values():
            least: int | None = None
            for scope, limits in scopes:
                limit = getattr(limits, kind.name)
                # A key is held by its tenant's limit anyway: a larger one of its own changes nothing.
                if limit is not None and (least is None or limit < least):
                    least = limit
                    amount = 0 if kind.unit is Unit.TOKENS else 1
                    demands.append(Demand(scope, kind, limit, amount, kind.name not in self._settings.shadow))
        tokens = tuple(demand for demand in demands if demand.kind.unit is Unit.TOKENS)
        outputs = [n for _, limits in scopes if (n := limits.max_output_tokens) is not None]
        return Plan(
            requests=tuple(demand for demand in demands if demand.kind.unit is not Unit.TOKENS),
            tokens=tokens,
            parallel=any(demand.kind.unit is Unit.PARALLEL for demand in demands),
            max_output_tokens=min(outputs, default=None),
            most_tokens=min((demand.limit for demand in tokens if demand.enforced), default=None),
        )


def _store(settings: LimitsSettings, metrics: LimitMetrics) -> Store | None:
    match settings.store:
        case "memory":
            return MemoryStore()
        case "redis":
            return RedisStore(settings.redis_url, metrics, timeout_s=settings.redis_timeout_s)
    return None


def with_defaults(limits: Limits, settings: LimitsSettings) -> Limits:
    """A tenant's limits, with the settings' where it has none of its own."""
    names = [*KINDS, "max_output_tokens"]
    changed = {
        name: getattr(settings, name)
        for name in names
        if getattr(limits, name) == getattr(DEFAULT_LIMITS, name)
    }
    return replace(limits, **changed)


def _own(limits: Limits) -> Limits:
    """A key's limits without the default rate: the tenant's holds it."""
    same = limits.requests_per_s == DEFAULT_LIMITS.requests_per_s
    return replace(limits, requests_per_s=None) if same else limits


class Reservation:
    """What one request holds. `settle` is safe at any time, in any state, any number of times."""

    __slots__ = (
        "_account", "_held", "_limiter", "_prompt_tokens", "_reserved_tokens", "_store",
        "ctx", "headers", "passed", "plan", "settled",
    )  # fmt: skip

    def __init__(
        self, limiter: Limiter, store: Store, ctx: RequestContext, account: Account, plan: Plan
    ) -> None:
        self.ctx = ctx
        self.plan = plan
        self.headers: dict[str, str] = {}
        """`x-ratelimit-*` of the answer."""
        self.passed = False
        """Whether the engine may have seen the request."""
        self.settled = False
        self._limiter = limiter
        self._store = store
        self._account = account
        self._held = False
        self._prompt_tokens = 0
        self._reserved_tokens = 0

    async def admit(self) -> None:
        """First step. Raises LimitExceeded, and StoreUnavailable unless limits fail open."""
        self._limiter.open.add(self)
        self._limiter.metrics.open.set(len(self._limiter.open))
        if self.plan.requests:
            await self._reserve(self.plan.requests, 0)

    async def take_tokens(self, prompt_tokens: int, output_tokens: int, longest_output: int) -> None:
        """Second step. `output_tokens`: the most of all choices together, `longest_output`: of one.

        Raises as `admit`.
        """
        self._prompt_tokens = prompt_tokens
        self._reserved_tokens = prompt_tokens + output_tokens
        if self.plan.tokens:
            demands = [demand._replace(amount=self._reserved_tokens) for demand in self.plan.tokens]
            await self._reserve(demands, longest_output)
        elif self.plan.parallel:
            self._limiter.spawn(self._note_output(longest_output))
        self.passed = True

    async def settle(self) -> None:
        """The request has ended, or will with its last byte. Never raises."""
        if self.settled:
            return
        self.settled = True
        self._limiter.open.discard(self)
        self._limiter.metrics.open.set(len(self._limiter.open))
        self._limiter.note_pace(self.ctx.tpot_s)
        if self._held:
            await self._store.settle(self._account, self.ctx.id, self._used_tokens())

    async def settle_before_the_last_byte(self) -> None:
        """Settles now if a client that goes on at once could find its own place, or tokens, still taken."""
        if self.plan.parallel or self.plan.tokens:
            await self.settle()

    def _used_tokens(self) -> int | None:
        ctx = self.ctx
        if not self.passed or (ctx.status is not None and 400 <= ctx.status < 500):
            return None
        used = ctx.prompt_tokens + ctx.completion_tokens
        if ctx.status is None or ctx.outcome == "disconnected":
            # It left before the first token told the prompt's length: the engine has worked on it.
            used = max(used, self._prompt_tokens)
        return min(used, self._reserved_tokens)

    async def _reserve(self, demands: Sequence[Demand], output_tokens: int) -> None:
        metrics = self._limiter.metrics
        held_before, self._held = self._held, True
        try:
            answers = await self._store.reserve(
                self._account,
                self.ctx.id,
                demands,
                output_tokens=output_tokens,
                pace_us=self._limiter.pace_us,
            )
        except StoreUnavailable as error:
            metrics.store_errors.inc()
            if not error.sent:
                self._held = held_before
            if self._limiter.fail_open:
                return
            raise
        self._note_headers(demands, answers)
        over = [pair for pair in zip(demands, answers, strict=True) if pair[1].over]
        if not over:
            return
        for demand, _ in over:
            if not demand.enforced:
                metrics.shadow.labels(demand.kind.name).inc()
        if refused(demands, answers):
            self._held = held_before
            demand, answer = _longest_wait(over)
            metrics.refused.labels(demand.kind.name).inc()
            raise LimitExceeded(demand, answer)

    async def _note_output(self, output_tokens: int) -> None:
        try:
            await self._store.reserve(
                self._account, self.ctx.id, (), output_tokens=output_tokens, pace_us=self._limiter.pace_us
            )
        except StoreUnavailable:
            log.debug("limits_note_lost", request_id=self.ctx.id)

    def _note_headers(self, demands: Sequence[Demand], answers: Sequence[Answer]) -> None:
        """Of each unit the limit that is nearest to its end; of a refusal, the one that refuses."""
        nearest: dict[Unit, tuple[tuple[bool, int, int], int, Answer]] = {}
        for demand, answer in zip(demands, answers, strict=True):
            unit = demand.kind.unit
            if unit is not Unit.PARALLEL and demand.enforced:
                order = (not answer.over, answer.remaining, -answer.reset_us)
                if unit not in nearest or order < nearest[unit][0]:
                    nearest[unit] = (order, demand.limit, answer)
        for unit, (_, limit, answer) in nearest.items():
            for name, value in zip(
                HEADER_NAMES[unit],
                (str(limit), str(answer.remaining), duration(answer.reset_us)),
                strict=True,
            ):
                self.headers[name] = value


def _longest_wait(over: Sequence[tuple[Demand, Answer]]) -> tuple[Demand, Answer]:
    """The refusal that lasts longest: until it is over, no retry can pass."""
    return max(
        (pair for pair in over if pair[0].enforced),
        key=lambda pair: (pair[1].wait_us < 0, pair[1].wait_us),
    )


def duration(microseconds: int) -> str:
    """As OpenAI writes `x-ratelimit-reset-*` (Go's durations): `0s`, `20ms`, `1.5s`, `6m0s`, `12h0m0s`."""
    milliseconds = ceil(microseconds / 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, left = divmod(milliseconds, 60_000)
    seconds = f"{left / 1000:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def kind_text(kind: Kind) -> str:
    """The limit's name for people: `tokens per minute`."""
    return kind.name.replace("per_s", "per second").replace("per_min", "per minute").replace("_", " ")
