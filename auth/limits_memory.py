"""Limits counted in this process: exact for one worker, forgotten when it ends."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from auth.limits import (
    EXACT_ENTRIES,
    MAX_PARALLEL_WAIT_US,
    SECOND_US,
    WINDOW_SHARES,
    Account,
    Answer,
    Demand,
    Kind,
    Unit,
    now_us,
    period_of,
)

IDLE_US = 120 * SECOND_US
"""A scope not asked for so long is forgotten, unless it still counts something."""


class Window:
    """Admissions within the last `width_us`: [first, last, amount], oldest first, and their sum."""

    __slots__ = ("entries", "num_gone", "total", "width_us")

    def __init__(self, width_us: int) -> None:
        self.width_us = width_us
        self.entries: deque[list[int]] = deque()
        self.num_gone = 0
        """Entries that have left: the oldest one's number."""
        self.total = 0

    def advance(self, now: int) -> None:
        """Forgets what is older than the window."""
        entries = self.entries
        while entries and entries[0][1] + self.width_us <= now:
            self.total -= entries.popleft()[2]
            self.num_gone += 1

    def add(self, now: int, amount: int) -> int:
        """Counts `amount` now; returns the number of the entry that it went to."""
        entries = self.entries
        self.total += amount
        if len(entries) >= EXACT_ENTRIES and now - entries[-1][0] < self.width_us // WINDOW_SHARES:
            entries[-1][1] = now
            entries[-1][2] += amount
        else:
            entries.append([now, now, amount])
        return self.num_gone + len(entries) - 1

    def lower(self, number: int, amount: int) -> None:
        """Takes `amount` off an entry; nothing where it has left the window."""
        if number >= self.num_gone:
            self.entries[number - self.num_gone][2] -= amount
            self.total -= amount

    def wait(self, now: int, limit: int, amount: int) -> int:
        """How long until `amount` has room; -1: never."""
        if amount > limit:
            return -1
        left = self.total
        for _, last, size in self.entries:
            left -= size
            if left + amount <= limit:
                return last + self.width_us - now
        return -1

    def reset(self, now: int) -> int:
        """How long until nothing is counted any more."""
        return self.entries[-1][1] + self.width_us - now if self.total else 0


@dataclass(slots=True)
class Scope:
    """The counts of one tenant or key."""

    touched: int = 0
    windows: dict[str, Window] = field(default_factory=dict)
    budgets: dict[str, list[int]] = field(default_factory=dict)
    """By kind: number of the period, tokens in it, when it ends."""
    leases: dict[str, "Lease"] = field(default_factory=dict)
    """Requests that hold a place among the parallel ones."""

    def idle(self, now: int) -> bool:
        """Whether forgetting it changes nothing."""
        for window in self.windows.values():
            window.advance(now)
        current = any(now < count[2] for count in self.budgets.values())
        return not current and not self.leases and not any(window.total for window in self.windows.values())


@dataclass(slots=True)
class Lease:
    """What one running request holds."""

    started: int
    output_tokens: int = 0
    held: list[tuple[Scope, Demand, int]] = field(default_factory=list)
    """Scope, demand, and the number of the window's entry or of the period."""


class MemoryStore:
    """The store of a server with one worker (see limits.Store)."""

    def __init__(self, clock: Callable[[], int] = now_us) -> None:
        self._clock = clock
        self._scopes: OrderedDict[tuple[str, str], Scope] = OrderedDict()
        self._leases: dict[str, Lease] = {}

    async def reserve(
        self, account: Account, lease: str, demands: Sequence[Demand], *, output_tokens: int, pace_us: int
    ) -> list[Answer]:
        """See limits.Store."""
        now = self._clock()
        self._forget_one(now)
        scopes = [self._scope(account, demand.scope, now) for demand in demands]
        pairs = list(zip(scopes, demands, strict=True))
        waits = [_wait(scope, demand, now, pace_us) for scope, demand in pairs]
        if not any(wait is not None and demand.enforced for wait, demand in zip(waits, demands, strict=True)):
            self._take_all(lease, pairs, now, output_tokens)
        return [
            _standing(scope, demand, now, wait) for (scope, demand), wait in zip(pairs, waits, strict=True)
        ]

    def _take_all(
        self, lease: str, pairs: list[tuple["Scope", Demand]], now: int, output_tokens: int
    ) -> None:
        held = self._leases.get(lease)
        if held is None:
            held = Lease(now)
            if pairs:
                self._leases[lease] = held
        held.output_tokens = output_tokens
        for scope, demand in pairs:
            held.held.append((scope, demand, _take(scope, demand, now, lease, held)))

    async def settle(self, account: Account, lease: str, used_tokens: int | None) -> None:
        """See limits.Store."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        for scope, demand, number in ended.held:
            if demand.kind.unit is Unit.PARALLEL:
                scope.leases.pop(lease, None)
                continue
            kept = 0 if used_tokens is None else used_tokens
            if demand.kind.unit is Unit.REQUESTS and used_tokens is not None:
                kept = demand.amount
            _lower(scope, demand.kind, number, demand.amount - kept)

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to let go of."""

    def _scope(self, account: Account, name: str, now: int) -> Scope:
        key = (account.tenant, account.key_id if name == "key" else "")
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope()
        else:
            self._scopes.move_to_end(key)
        scope.touched = now
        return scope

    def _forget_one(self, now: int) -> None:
        """Looks at the scope that was longest unused: with one look a request, none stays for long."""
        if self._scopes:
            key, scope = next(iter(self._scopes.items()))
            if scope.touched + IDLE_US > now:
                return
            if scope.idle(now):
                del self._scopes[key]
            else:
                self._scopes.move_to_end(key)
                scope.touched = now


def _wait(scope: Scope, demand: Demand, now: int, pace_us: int) -> int | None:
    """How long until `demand` has room, -1: never; None where it has room now."""
    _, kind, limit, amount, _ = demand
    if kind.window_us:
        window = scope.windows.get(kind.code)
        if window is None:
            window = scope.windows[kind.code] = Window(kind.window_us)
        window.advance(now)
        return window.wait(now, limit, amount) if window.total + amount > limit else None
    if kind.period:
        budget = scope.budgets.get(kind.code)
        if budget is None or now >= budget[2]:
            number, end = period_of(kind, now)
            budget = scope.budgets[kind.code] = [number, 0, end]
        if budget[1] + amount <= limit:
            return None
        return -1 if amount > limit else budget[2] - now
    return _parallel_wait(scope, now, pace_us) if len(scope.leases) + amount > limit else None


def _standing(scope: Scope, demand: Demand, now: int, wait: int | None) -> Answer:
    """The answer, with what is left of the limit now."""
    _, kind, limit, _, _ = demand
    if kind.window_us:
        window = scope.windows[kind.code]
        used, reset = window.total, window.reset(now)
    elif kind.period:
        _, used, end = scope.budgets[kind.code]
        reset = end - now if used else 0
    else:
        used, reset = len(scope.leases), 0
    return Answer(wait is not None, wait or 0, limit - used if limit > used else 0, reset)


def _parallel_wait(scope: Scope, now: int, pace_us: int) -> int:
    """Until the first request that must end by then does; a second where nothing is known."""
    ends = [
        lease.started + lease.output_tokens * pace_us - now
        for lease in scope.leases.values()
        if lease.output_tokens
    ]
    return min(max(min(ends, default=SECOND_US), SECOND_US), MAX_PARALLEL_WAIT_US)


def _take(scope: Scope, demand: Demand, now: int, lease: str, held: Lease) -> int:
    kind = demand.kind
    if kind.window_us:
        return scope.windows[kind.code].add(now, demand.amount)
    if kind.period:
        budget = scope.budgets[kind.code]
        budget[1] += demand.amount
        return budget[0]
    scope.leases[lease] = held
    return 0


def _lower(scope: Scope, kind: Kind, number: int, amount: int) -> None:
    if kind.window_us:
        scope.windows[kind.code].lower(number, amount)
    elif (budget := scope.budgets[kind.code])[0] == number:
        budget[1] -= amount
