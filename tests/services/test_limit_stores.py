"""Both stores of limits: what must hold of each, and that Redis answers as memory does."""

import asyncio
import itertools
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from auth.limits import KINDS, SECOND_US, Account, Answer, Demand, Store, Unit, refused
from auth.limits_memory import MemoryStore
from auth.limits_redis import RedisStore
from metrics.limits import LimitMetrics

START_US = 1_790_000_000 * SECOND_US
LIMIT, BURST, ROUNDS = 10, 50, 20
FOR_EVER_S = 10.0**8
_numbers = itertools.count()


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = START_US

    def __call__(self) -> int:
        return self.now


def account() -> Account:
    """One that no test has used before."""
    return Account(f"tenant-{next(_numbers)}", "key")


def demand(name: str, limit: int, amount: int = 1, scope: str = "tenant", *, enforced: bool = True) -> Demand:
    """A demand by the limit's name."""
    return Demand(scope, KINDS[name], limit, amount, enforced)


def redis_store(url: str, clock: Callable[[], int] | None, lease_s: float = FOR_EVER_S) -> RedisStore:
    """A Redis store; waits long for a slow machine."""
    return RedisStore(url, LimitMetrics(CollectorRegistry()), timeout_s=30, lease_s=lease_s, clock=clock)


@asynccontextmanager
async def opened(kind: str, url: str, clock: Clock) -> AsyncIterator[Store]:
    """The store of this kind, closed on leaving."""
    store: Store = MemoryStore(clock) if kind == "memory" else redis_store(url, clock)
    try:
        yield store
    finally:
        await store.close()


async def ask(
    store: Store, who: Account, lease: str, *demands: Demand, output_tokens: int = 0
) -> list[Answer]:
    """`reserve` at a pace of 10 ms a token."""
    return await store.reserve(who, lease, demands, output_tokens=output_tokens, pace_us=10_000)


both = pytest.mark.parametrize("kind", ["memory", "redis"])
every_limit = pytest.mark.parametrize("name", list(KINDS))


@both
@every_limit
def test_a_burst_never_gets_more_than_the_limit(kind: str, name: str, redis_url: str) -> None:
    """50 at the same instant, 20 rounds: exactly the limit passes, and what did not pass holds nothing."""
    amount = 7 if KINDS[name].unit is Unit.TOKENS else 1

    async def run() -> None:
        async with opened(kind, redis_url, Clock()) as store:
            for _ in range(ROUNDS):
                who = account()
                asked = [ask(store, who, str(n), demand(name, LIMIT * amount, amount)) for n in range(BURST)]
                answers = [answer for (answer,) in await asyncio.gather(*asked)]
                assert sum(not answer.over for answer in answers) == LIMIT
                (after,) = await ask(store, who, "after", demand(name, LIMIT * amount, amount))
                assert (after.over, after.remaining) == (True, 0)

    asyncio.run(run())


def _burst_of_one_process(url: str, names: list[str], barrier: Any, results: Any, number: int) -> None:
    async def run() -> None:
        store = redis_store(url, lambda: START_US)
        for name, turn in itertools.product(names, range(ROUNDS)):
            amount = 7 if KINDS[name].unit is Unit.TOKENS else 1
            who = Account(f"processes-{name}-{turn}", "key")
            barrier.wait()
            asked = [
                ask(store, who, f"{number}-{n}", demand(name, LIMIT * amount, amount))
                for n in range(BURST // 4 + 1)
            ]
            passed = sum(not answer.over for (answer,) in await asyncio.gather(*asked))
            results.put((name, turn, passed))
        await store.close()

    asyncio.run(run())


def test_a_burst_from_four_processes(redis_url: str) -> None:
    """As above, every kind of limit, from four processes over one Redis. (Memory refuses several workers.)"""
    context = multiprocessing.get_context("forkserver")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_burst_of_one_process, args=(redis_url, list(KINDS), barrier, results, number))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    passed: dict[tuple[str, int], int] = {}
    for _ in range(4 * ROUNDS * len(KINDS)):
        name, turn, count = results.get(timeout=120)
        passed[name, turn] = passed.get((name, turn), 0) + count
    for worker in workers:
        worker.join(30)
    assert len(passed) == ROUNDS * len(KINDS)
    assert set(passed.values()) == {LIMIT}


@both
def test_all_or_nothing(kind: str, redis_url: str) -> None:
    """One limit that refuses keeps the others as they were."""

    async def run() -> None:
        async with opened(kind, redis_url, Clock()) as store:
            who = account()
            rest = [
                demand("requests_per_min", 5),
                demand("parallel_requests", 5),
                demand("tokens_per_day", 50, 10),
            ]
            assert not refused(rest, await ask(store, who, "a", *rest))
            blocked = [*rest, demand("tokens_per_min", 20, 21, "key")]
            for n in range(10):
                assert refused(blocked, await ask(store, who, f"b{n}", *blocked))
            answers = await ask(store, who, "c", *rest)
            assert [answer.remaining for answer in answers] == [3, 3, 30]

    asyncio.run(run())


@both
@pytest.mark.parametrize("name", ["requests_per_s", "requests_per_min", "tokens_per_min"])
def test_a_retry_after_the_wait_is_admitted_and_not_before(kind: str, name: str, redis_url: str) -> None:
    """Windows slide: at the told moment there is room, a microsecond before there is none."""

    async def run() -> None:
        clock = Clock()
        async with opened(kind, redis_url, clock) as store:
            who = account()
            width = KINDS[name].window_us
            for n in range(8):
                assert not (await ask(store, who, f"a{n}", demand(name, 80, 10)))[0].over
                clock.now += width // 16
            (answer,) = await ask(store, who, "big", demand(name, 80, 35))
            assert answer.over
            assert 0 < answer.wait_us <= width
            clock.now += answer.wait_us - 1
            assert (await ask(store, who, "early", demand(name, 80, 35)))[0].over
            clock.now += 1
            assert not (await ask(store, who, "late", demand(name, 80, 35)))[0].over

    asyncio.run(run())


@both
@pytest.mark.parametrize("name", ["tokens_per_day", "tokens_per_month"])
def test_budgets_start_again_with_the_calendar(kind: str, name: str, redis_url: str) -> None:
    """The wait ends at midnight, UTC, or with the month; older use is not taken off a new period."""

    async def run() -> None:
        clock = Clock()
        async with opened(kind, redis_url, clock) as store:
            who = account()
            await ask(store, who, "old", demand(name, 100, 90))
            (answer,) = await ask(store, who, "more", demand(name, 100, 20))
            assert answer.over
            clock.now += answer.wait_us - 1
            assert (await ask(store, who, "early", demand(name, 100, 20)))[0].over
            clock.now += 1
            (fresh,) = await ask(store, who, "late", demand(name, 100, 20))
            assert (fresh.over, fresh.remaining) == (False, 80)
            await store.settle(who, "old", 1)
            assert (await ask(store, who, "next", demand(name, 100, 0)))[0].remaining == 80

    asyncio.run(run())


@both
def test_parallel_wait_comes_from_what_runs(kind: str, redis_url: str) -> None:
    """The first request that must end tells; no second less than one, and half a minute at most."""

    async def run() -> None:
        clock = Clock()
        async with opened(kind, redis_url, clock) as store:
            who = account()
            limit = demand("parallel_requests", 2)
            await ask(store, who, "a", limit, output_tokens=100_000)
            await ask(store, who, "b", limit)
            assert (await ask(store, who, "c", limit))[0].wait_us == 30 * SECOND_US
            await ask(store, who, "b", output_tokens=400)
            clock.now += SECOND_US
            assert (await ask(store, who, "c", limit))[0].wait_us == 3 * SECOND_US

    asyncio.run(run())


@both
def test_shadow_counts_and_refuses_nobody(kind: str, redis_url: str) -> None:
    """A limit that is not enforced says it is over, and all is reserved."""

    async def run() -> None:
        async with opened(kind, redis_url, Clock()) as store:
            who = account()
            shadow = demand("tokens_per_min", 10, 8, enforced=False)
            assert not (await ask(store, who, "a", shadow, demand("requests_per_min", 5)))[0].over
            over, other = await ask(store, who, "b", shadow, demand("requests_per_min", 5))
            assert (over.over, other.over, other.remaining) == (True, False, 3)

    asyncio.run(run())


def _differ(plan: list[Any], url: str) -> None:
    """Runs `plan` on both stores; every answer must be the same. A request takes its place only once."""

    async def run() -> None:
        open_leases: set[str] = set()
        clock = Clock()
        memory, redis = MemoryStore(clock), redis_store(url, clock)
        who = account()
        other = Account(who.tenant, "other")
        for step in plan:
            match step:
                case ("wait", microseconds):
                    clock.now += microseconds
                case ("settle", lease, used):
                    open_leases.discard(lease)
                    await memory.settle(who, lease, used)
                    await redis.settle(who, lease, used)
                case ("reserve", second_key, lease, demands):
                    mine = other if second_key else who
                    mine_lease = f"{lease}-{mine.key_id}" if second_key else lease
                    if mine_lease in open_leases:
                        demands = [item for item in demands if item.kind.unit is not Unit.PARALLEL]
                    expected = await ask(memory, mine, mine_lease, *demands, output_tokens=50)
                    if not refused(demands, expected):
                        open_leases.add(mine_lease)
                    assert await ask(redis, mine, mine_lease, *demands, output_tokens=50) == expected
        await redis.close()

    asyncio.run(run())


_demands = st.lists(
    st.builds(
        demand,
        st.sampled_from(list(KINDS)),
        st.integers(1, 40),
        st.integers(1, 12),
        st.sampled_from(["tenant", "key"]),
        enforced=st.sampled_from([True, True, True, False]),
    ),
    max_size=4,
    unique_by=lambda item: (item.kind.name, item.scope),
).map(lambda found: [item._replace(amount=1) if item.kind.unit is Unit.PARALLEL else item for item in found])
_leases = st.sampled_from([f"lease-{n}" for n in range(12)])
_steps = st.one_of(
    st.tuples(st.just("reserve"), st.booleans(), _leases, _demands),
    st.tuples(st.just("reserve"), st.booleans(), _leases, _demands),
    st.tuples(st.just("settle"), _leases, st.one_of(st.none(), st.integers(0, 15))),
    st.tuples(
        st.just("wait"), st.sampled_from([1, 1000, SECOND_US // 3, 20 * SECOND_US, 90_000 * SECOND_US])
    ),
)


@settings(max_examples=60, deadline=None)
@given(plan=st.lists(_steps, max_size=40))
def test_redis_answers_as_memory_does(plan: list[Any], redis_url: str) -> None:
    """Any order of reservations, ends and pauses."""
    _differ(plan, redis_url)


def test_a_full_window_is_kept_small(redis_url: str) -> None:
    """Thousands of admissions: equal in both, never over the limit in any window, few entries."""
    plan: list[Any] = []
    for n in range(900):
        plan.append(
            ("reserve", False, f"r{n}", [demand("requests_per_s", 600), demand("tokens_per_min", 9000, 3)])
        )
        plan.append(("wait", 900))
        if n % 7 == 0:
            plan.append(("settle", f"r{n}", [None, 1][n % 2]))
    _differ(plan, redis_url)

    async def run() -> None:
        clock = Clock()
        store = MemoryStore(clock)
        who = account()
        admitted: list[int] = []
        for n in range(9000):
            clock.now += 500
            if not (await ask(store, who, str(n), demand("requests_per_s", 700)))[0].over:
                admitted.append(clock.now)
        assert len(admitted) > 4.4 * 700 * 0.97
        for first, later in itertools.pairwise([*admitted[::700]]):
            assert later - first >= SECOND_US
        window = store._scopes[(who.tenant, "")].windows["rs"]
        assert len(window.entries) <= 256 + 64 + 1

    asyncio.run(run())


def test_a_dead_workers_reservations_come_back(redis_url: str) -> None:
    """Leases that nobody renews expire: places and tokens return; those of a living worker stay."""

    async def run() -> None:
        clock = Clock()
        dead, alive = (redis_store(redis_url, clock, lease_s=30) for _ in range(2))
        who = account()
        wants = [
            demand("parallel_requests", 2),
            demand("tokens_per_month", 100, 40),
            demand("requests_per_min", 9),
        ]
        assert not refused(wants, await ask(dead, who, "dead", *wants))
        assert not refused(wants, await ask(alive, who, "alive", *wants))
        await dead._line.close()  # as kill -9 would leave it
        clock.now += 20 * SECOND_US
        for command in alive._renewals():
            await alive._line.run(command)
        clock.now += 20 * SECOND_US
        answers = await ask(alive, who, "next", *wants)
        assert not refused(wants, answers)
        # The dead one's request stays counted: it was admitted.
        assert [answer.remaining for answer in answers] == [0, 20, 6]
        await alive.close()

    asyncio.run(run())


def test_what_a_cancelled_request_reserved_is_given_back(redis_url: str) -> None:
    """Cancelled at any point of the reservation, and settled after it: nothing stays."""

    async def run() -> None:
        store = redis_store(redis_url, Clock())
        who = account()
        limit = demand("parallel_requests", 1000)

        async def one(number: int) -> None:
            asked = asyncio.ensure_future(ask(store, who, str(number), limit))
            for _ in range(number % 6):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await store.settle(who, str(number), None)

        await asyncio.gather(*(one(number) for number in range(300)))
        (answer,) = await ask(store, who, "after", limit)
        assert answer.remaining == 999
        await store.close()

    asyncio.run(run())
