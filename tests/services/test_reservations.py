"""Thousands of requests that end in every way there is: afterwards nothing is held that nobody holds."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry

from auth.limiter import Limiter, LimitExceeded, Reservation
from auth.limits import KINDS, SECOND_US, Account, Demand, Store
from auth.limits_memory import MemoryStore
from auth.limits_redis import RedisStore
from auth.principal import Limits, Principal
from metrics.limits import LimitMetrics
from server.auth_sections import LimitsSettings
from server.context import RequestContext

START_US = 1_790_000_000 * SECOND_US
LEASE_S = 30
TENANT_LIMITS = Limits(
    requests_per_s=None, parallel_requests=6, tokens_per_min=300, tokens_per_day=3000, requests_per_min=40
)
KEY_LIMITS = Limits(parallel_requests=4, tokens_per_day=2000)
COUNTED = ("parallel_requests", "tokens_per_day", "tokens_per_min", "requests_per_min")
STARTS = ("passes", "passes", "passes", "bad body", "unknown model", "cancelled", "leaves")
WAYS = (
    "ok",
    "disconnect before a token",
    "disconnect",
    "engine error",
    "timeout",
    "cut off",
    "bad parameter",
)

_numbers = itertools.count()


@dataclass
class Running:
    """A request past both steps, and what it asked for."""

    reservation: Reservation
    account: Account
    prompt: int
    output: int


@dataclass
class World:
    """One limiter over one store, and what must be counted in it."""

    store: Store
    clock: list[int]
    limiter: Limiter
    suffix: str = field(default_factory=lambda: str(next(_numbers)))
    running: list[Running] = field(default_factory=list)
    used: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Tokens settled, by scope."""


class Requests(RuleBasedStateMachine):
    """Requests of two tenants with two keys each; subclasses say over which store."""

    num_begun = 0
    loop: asyncio.AbstractEventLoop

    def make_store(self, clock: list[int]) -> Store:
        """The store under test."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.clock = [START_US]
        self.world = self._new_world()

    def _new_world(self) -> World:
        store = self.make_store(self.clock)
        limits = LimitsSettings(requests_per_s=None)
        return World(store, self.clock, Limiter(limits, LimitMetrics(CollectorRegistry()), store))

    def run(self, work: Any) -> Any:
        """The result of a coroutine."""
        return self.loop.run_until_complete(work)

    @rule(seed=st.integers(0, 10**6), count=st.integers(1, 30))
    def begin(self, seed: int, count: int) -> None:
        """Several arrive; a seed stands for what they are, which is cheaper than to draw each part."""
        chance = Random(seed)
        type(self).num_begun += count
        for _ in range(count):
            tenant, key = f"{chance.choice('ab')}-{self.world.suffix}", chance.choice("12")
            work = self._begin(
                tenant, key, chance.randint(1, 30), chance.randint(1, 40), chance.choice(STARTS)
            )
            self.run(work)

    async def _begin(self, tenant: str, key: str, prompt: int, output: int, way: str) -> None:
        principal = Principal(tenant, key, key, tenant_limits=TENANT_LIMITS, key_limits=KEY_LIMITS)
        ctx = RequestContext("POST", "/v1/chat/completions")
        reservation = self.world.limiter.reservation(ctx, principal)
        assert reservation is not None
        try:
            admitting = asyncio.ensure_future(reservation.admit())
            if way == "cancelled":
                await asyncio.sleep(0)
                admitting.cancel()
            await asyncio.gather(admitting, return_exceptions=True)
            if not admitting.cancelled():
                admitting.result()
            if way == "passes":
                await reservation.take_tokens(prompt, output, output)
        except LimitExceeded:
            ctx.status = 429
            await reservation.settle()
            return
        if way == "passes":
            self.world.running.append(Running(reservation, Account(tenant, key), prompt, output))
            return
        ctx.status = None if way in ("cancelled", "leaves") else 400
        await reservation.settle()
        await reservation.settle()

    @rule(data=st.data(), way=st.sampled_from(WAYS), share=st.floats(0, 1))
    def end(self, data: st.DataObject, way: str, share: float) -> None:
        """One of them ends."""
        if self.world.running:
            index = data.draw(st.integers(0, len(self.world.running) - 1))
            self._end(self.world.running.pop(index), way, share)

    def _end(self, request: Running, way: str, share: float) -> None:
        ctx = request.reservation.ctx
        used = request.prompt
        if way != "disconnect before a token":
            ctx.prompt_tokens = request.prompt
            ctx.completion_tokens = int(share * request.output)
            used += ctx.completion_tokens
        match way:
            case "ok" | "disconnect":
                ctx.status = 200
                ctx.outcome = "disconnected" if way == "disconnect" else None
            case "engine error" | "timeout":
                ctx.status = 503 if way == "engine error" else 500
            case "bad parameter":  # found by the engine's own checks, after the second step
                ctx.status, used = 400, 0
        for scope in (request.account.tenant, request.account.key_id):
            self.world.used[request.account.tenant, scope] += used
        self.run(request.reservation.settle())

    @invariant()
    def counted_is_what_runs_and_what_was_used(self) -> None:
        """Places: what runs. Tokens: the worst case of what runs, the use of what ended."""
        world = self.world
        for tenant, key in itertools.product((f"a-{world.suffix}", f"b-{world.suffix}"), "12"):
            counts = self.run(self._counts(Account(tenant, key)))
            for scope, name in (("tenant", tenant), ("key", key)):
                mine = [
                    item
                    for item in world.running
                    if item.account.tenant == tenant and name in (tenant, item.account.key_id)
                ]
                worst = sum(item.prompt + item.output for item in mine)
                assert counts[scope, "parallel_requests"] == len(mine)
                assert counts[scope, "tokens_per_day"] == worst + world.used[tenant, name]
            assert counts["tenant", "parallel_requests"] <= 6
            assert counts["tenant", "tokens_per_min"] <= 300
            assert counts["tenant", "requests_per_min"] <= 40

    async def _counts(self, account: Account) -> dict[tuple[str, str], int]:
        """What the store counts, asked for with a demand that is always refused."""
        most = 10**9
        wants = [Demand(scope, KINDS[name], most, 0) for scope in ("tenant", "key") for name in COUNTED]
        never = Demand("tenant", KINDS["tokens_per_month"], 1, 2)
        answers = await self.world.store.reserve(
            account, "probe", [*wants, never], output_tokens=0, pace_us=0
        )
        return {
            (want.scope, want.kind.name): most - answer.remaining
            for want, answer in zip(wants, answers, strict=False)
        }

    def teardown(self) -> None:
        """All end: every place is free, and only what was used is counted."""
        while self.world.running:
            self._end(self.world.running.pop(), "ok", 0.5)
        self.counted_is_what_runs_and_what_was_used()
        assert not self.world.limiter.open
        assert self.world.limiter.metrics.open._value.get() == 0
        self.clock[0] += 120 * SECOND_US
        for tenant in (f"a-{self.world.suffix}", f"b-{self.world.suffix}"):
            counts = self.run(self._counts(Account(tenant, "1")))
            assert [counts["tenant", name] for name in COUNTED if not name.endswith("day")] == [0, 0, 0]
        self.run(self.world.limiter.close())


def check(machine: type[Requests], num_requests: int) -> None:
    """Runs the machine until so many requests have begun."""
    found = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine.num_begun = 0
    with asyncio.Runner() as runner:
        machine.loop = runner.get_loop()
        while machine.num_begun < num_requests:
            run_state_machine_as_test(machine, settings=found)


def test_ten_thousand_requests_in_memory() -> None:
    """Every counter is back."""

    class InMemory(Requests):
        def make_store(self, clock: list[int]) -> Store:
            return MemoryStore(lambda: clock[0])

    check(InMemory, 10_000)


def test_requests_over_redis(redis_url: str) -> None:
    """The same, and workers that die: what they held comes back when their leases expire."""

    class OverRedis(Requests):
        def make_store(self, clock: list[int]) -> Store:
            metrics = LimitMetrics(CollectorRegistry())
            return RedisStore(redis_url, metrics, timeout_s=30, lease_s=LEASE_S, clock=lambda: clock[0])

        @rule()
        def the_worker_dies(self) -> None:
            """kill -9: no request is settled; a new worker takes over, and time passes."""
            dead = self.world
            assert isinstance(dead.store, RedisStore)
            if dead.store._keeper is not None:
                dead.store._keeper.cancel()
            self.run(dead.store._line.close())
            self.clock[0] += (LEASE_S + 1) * SECOND_US
            self.world = self._new_world()
            self.world.suffix, self.world.used = dead.suffix, dead.used

    check(OverRedis, 1_500)
