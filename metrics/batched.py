"""Prometheus metrics for one thread, gathered in plain numbers and written to prometheus_client in batches.

prometheus_client takes a lock for each value and, with several processes, writes it to a mapped file: too
much for what happens at every token. What is gathered here reaches the page at `flush()`, which the /metrics
page calls first, and `keep_flushing` twice a second, for the page that another process makes.
"""

import asyncio
import time
from bisect import bisect_left
from weakref import WeakSet

from prometheus_client import Counter, Gauge, Histogram

FLUSH_EVERY_S = 0.5

_all: "WeakSet[BatchedCounter | BatchedGauge | BatchedHistogram]" = WeakSet()


def flush() -> None:
    """Writes all that has been gathered; for the thread that gathers."""
    for metric in _all:
        metric.flush()


async def keep_flushing() -> None:
    """Flushes every FLUSH_EVERY_S seconds until cancelled."""
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        flush()


class BatchedCounter(Counter):
    """A Counter whose increments wait for `flush`."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending = 0.0
        _all.add(self)

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Adds `amount`, which is not negative."""
        if amount < 0:
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self._pending += amount

    def flush(self) -> None:
        """Writes what has been gathered."""
        if self._pending:
            super().inc(self._pending)
            self._pending = 0.0


class BatchedGauge(Gauge):
    """A Gauge whose last value waits for `flush`; it is set and nothing else.

    Of several processes the one that set it last counts (`mostrecent`), not the one that flushed last: when
    the engine falls idle only one of them hears of it.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending: float | None = None
        self._set_at = 0.0
        _all.add(self)

    def set(self, value: float) -> None:
        """The value from the next flush on."""
        self._pending = float(value)
        self._set_at = time.time()

    def flush(self) -> None:
        """Writes what has been gathered."""
        if self._pending is not None:
            self._value.set(self._pending, timestamp=self._set_at if self._is_most_recent else None)
            self._pending = None


class BatchedHistogram(Histogram):
    """A Histogram whose observations wait for `flush`."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts = [0] * len(self._upper_bounds)
        self._pending_sum = 0.0
        _all.add(self)

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """One value."""
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._pending_sum += amount

    def observe_many(self, amount: float, times: int) -> None:
        """The same value `times` times."""
        self._counts[bisect_left(self._upper_bounds, amount)] += times
        self._pending_sum += amount * times

    def flush(self) -> None:
        """Writes what has been gathered.

        prometheus_client has no public way to add many values at once; a unit test holds on to this one.
        """
        if not any(self._counts):
            return
        self._sum.inc(self._pending_sum)
        for bucket, count in zip(self._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._counts = [0] * len(self._upper_bounds)
        self._pending_sum = 0.0
