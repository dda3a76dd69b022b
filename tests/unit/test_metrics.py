"""Request metrics from contexts made by hand."""

import pytest
from prometheus_client import generate_latest

from metrics import batched
from metrics.requests import RequestMetrics
from server.context import RequestContext

CHAT = "/v1/chat/completions"


def _value(metrics: RequestMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"lapilli_{name}", {"model": "m", **labels})


def _context(**facts: object) -> RequestContext:
    ctx = RequestContext("POST", CHAT, received_at=100.0)
    for name, value in facts.items():
        setattr(ctx, name, value)
    return ctx


def test_ttft_counts_from_arrival_and_tpot_leaves_out_the_first_token() -> None:
    """5 tokens, first at 0.2 s, last at 1.0 s: TTFT 0.2 s, TPOT 0.2 s."""
    metrics = RequestMetrics("m")
    ctx = _context(first_token_at=100.2, last_token_at=101.0, longest_choice_tokens=5, status=200)
    metrics.begin(ctx)
    metrics.end(ctx, 1.1)
    assert _value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.2)
    assert _value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert _value(metrics, "request_duration_seconds_sum") == pytest.approx(1.1)
    assert _value(metrics, "request_queue_seconds_count") == 0


def test_one_token_has_no_tpot() -> None:
    """There is no gap to speak of."""
    metrics = RequestMetrics("m")
    metrics.end(_context(first_token_at=100.2, last_token_at=100.2, longest_choice_tokens=1, status=200), 1)
    assert _value(metrics, "time_to_first_token_seconds_count") == 1
    assert _value(metrics, "time_per_output_token_seconds_count") == 0


def test_a_step_of_several_tokens_counts_a_gap_for_each() -> None:
    """Three tokens after 0.3 s: three gaps of 0.1 s."""
    metrics = RequestMetrics("m")
    metrics.gap(0.3, 3)
    batched.flush()
    assert _value(metrics, "inter_token_seconds_count") == 3
    assert _value(metrics, "inter_token_seconds_sum") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        ({"status": 200}, "ok"),
        ({"status": 404}, "client_error"),
        ({"status": 503}, "server_error"),
        ({}, "server_error"),
        ({"status": 200, "outcome": "disconnected"}, "disconnected"),
        ({"status": 200, "outcome": "stream_error"}, "stream_error"),
    ],
)
def test_outcomes(facts: dict[str, object], outcome: str) -> None:
    """The status tells, unless something more exact was noted."""
    metrics = RequestMetrics("m")
    ctx = _context(**facts)
    metrics.begin(ctx)
    assert metrics.registry.get_sample_value("lapilli_requests_in_flight") == 1
    metrics.end(ctx, 0.1)
    assert metrics.registry.get_sample_value("lapilli_requests_in_flight") == 0
    assert _value(metrics, "requests_total", endpoint=CHAT, outcome=outcome) == 1


def test_other_paths_are_not_counted() -> None:
    """Probes do not blur the figures; and the buckets go from 1 ms to 10 min."""
    metrics = RequestMetrics("m")
    ctx = RequestContext("GET", "/health", status=200)
    metrics.begin(ctx)
    metrics.end(ctx, 0.1)
    page = generate_latest(metrics.registry).decode()
    assert "/health" not in page
    assert 'request_duration_seconds_bucket{le="0.001",model="m"} 0.0' in page
    assert 'le="600.0"' in page
