"""Batched metrics say the same as prometheus_client's own, after a flush."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector

from metrics import batched

disable_created_metrics()  # type: ignore[no-untyped-call]  # as metrics/requests.py does

BUCKETS = (0.1, 1.0, 10.0)
VALUES = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0, 1.5, 10.0, 11.0, 1e6]))


def _page(counter: type[Counter], gauge: type[Gauge], histogram: type[Histogram], values: list[float]) -> str:
    registry = CollectorRegistry()
    counters = counter("tokens", "d", ["model"], registry=registry).labels("m")
    gauges = gauge("running", "d", ["model"], registry=registry).labels("m")
    histograms = histogram("gap", "d", ["model"], registry=registry, buckets=BUCKETS).labels("m")
    for value in values:
        counters.inc(value)
        gauges.set(value)
        histograms.observe(value)
    batched.flush()
    batched.flush()
    return generate_latest(registry).decode()


@given(VALUES)
def test_same_page(values: list[float]) -> None:
    """Values on a bucket's edge, beyond the last bucket, none at all; flushing twice changes nothing."""
    ours = _page(batched.BatchedCounter, batched.BatchedGauge, batched.BatchedHistogram, values)
    assert ours == _page(Counter, Gauge, Histogram, values)


def test_nothing_is_written_before_the_flush() -> None:
    """That is the point: a token costs no write."""
    registry = CollectorRegistry()
    histogram = batched.BatchedHistogram("gap", "d", registry=registry, buckets=BUCKETS)
    histogram.observe_many(0.5, 3)
    assert registry.get_sample_value("gap_count") == 0
    histogram.flush()
    assert registry.get_sample_value("gap_count") == 3
    assert registry.get_sample_value("gap_sum") == pytest.approx(1.5)


def test_a_counter_only_grows() -> None:
    """As prometheus_client's own."""
    with pytest.raises(ValueError, match="non-negative"):
        batched.BatchedCounter("tokens", "d", registry=CollectorRegistry()).inc(-1)


def test_the_value_set_last_counts_whoever_flushes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that heard of the engine's idleness flushes before one that has an older step to write."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    clock = iter([100.0, 100.4])
    monkeypatch.setattr("metrics.batched.time.time", lambda: next(clock))
    gauges = []
    for process in (1, 2):
        values_of_one = values.MultiProcessValue(lambda pid=process: pid)  # type: ignore[no-untyped-call]
        monkeypatch.setattr(values, "ValueClass", values_of_one)
        registry = CollectorRegistry()
        gauges.append(batched.BatchedGauge("running", "d", multiprocess_mode="mostrecent", registry=registry))
    busy, idle = gauges
    busy.set(1)
    idle.set(0)
    idle.flush()
    busy.flush()
    page = CollectorRegistry()
    MultiProcessCollector(page, str(tmp_path))  # type: ignore[no-untyped-call]
    assert page.get_sample_value("running") == 0
