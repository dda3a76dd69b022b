"""Batched metrics say the same as prometheus_client's own, after a flush."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from metrics import batched

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
