"""Figures of loads: percentiles, one run's summary, the median over runs. Nothing here touches a server."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.load import StreamResult


def percentile_ms(values_s: Iterable[float], share: float) -> float | None:
    """The `share` (0 to 1) quantile of seconds, in milliseconds; None of nothing."""
    ordered = sorted(values_s)
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)


def summary(results: list[StreamResult], cpu_s: float) -> dict[str, Any]:
    """One load's figures; `cpu_s` is the CPU time in seconds that the front end used meanwhile."""
    good = [result for result in results if result.good]
    tokens = sum(result.tokens for result in good)
    wall_s = _wall_s(results)
    ttft = [result.ttft_s for result in good if result.ttft_s is not None]
    gaps = [gap for result in good for gap in result.gaps_s]
    tpot = [(r.total_s - r.ttft_s) / (r.tokens - 1) for r in good if r.ttft_s is not None and r.tokens > 1]
    return {
        "requests": len(results),
        "ok": len(good),
        "tokens": tokens,
        "wall_s": round(wall_s, 2),
        "tokens_per_s": round(tokens / wall_s, 1) if wall_s else 0.0,
        "frames_per_token": round(sum(result.frames for result in good) / max(1, tokens), 3),
        "ttft_p50_ms": percentile_ms(ttft, 0.5),
        "ttft_p99_ms": percentile_ms(ttft, 0.99),
        "itl_p50_ms": percentile_ms(gaps, 0.5),
        "itl_p99_ms": percentile_ms(gaps, 0.99),
        "tpot_p50_ms": percentile_ms(tpot, 0.5),
        "gateway_cpu_us_per_token": round(cpu_s * 1e6 / max(1, tokens), 1),
        "gateway_cpu_us_per_request": round(cpu_s * 1e6 / max(1, len(good)), 1),
        "gateway_cores": round(cpu_s / wall_s, 3) if wall_s else 0.0,
        "errors": sorted(
            {result.error or f"status {result.status}" for result in results if not result.good}
        )[:4],
    }


def _wall_s(results: list[StreamResult]) -> float:
    """Seconds from the first request's start to the last one's end, over all client processes."""
    if not results:
        return 0.0
    return max(r.started_at + r.total_s for r in results) - min(r.started_at for r in results)


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number over `runs`; None where no run has one. Errors are put together."""
    merged: dict[str, Any] = {}
    for name in runs[0]:
        if name == "errors":
            merged[name] = sorted({error for run in runs for error in run[name]})[:4]
            continue
        values = [run[name] for run in runs if run[name] is not None]
        merged[name] = round(median(values), 3) if values else None
    return merged


def rotated(names: list[str], by: int) -> list[str]:
    """`names` in an order that begins `by` places later, so that none is always first."""
    start = by % len(names) if names else 0
    return names[start:] + names[:start]
