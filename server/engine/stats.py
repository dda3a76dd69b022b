"""vLLM's `vllm:*` series, gathered in plain numbers and written in batches (metrics/batched.py)."""

from vllm.v1.metrics.loggers import PrometheusStatLogger

from metrics.batched import BatchedCounter, BatchedGauge, BatchedHistogram


class BatchedStatLogger(PrometheusStatLogger):
    """vLLM's own logger; only the classes of its metrics are ours.

    It observes every gap between two tokens one by one, and sets some ten gauges and counters at every step.
    """

    _gauge_cls = BatchedGauge
    _counter_cls = BatchedCounter
    _histogram_cls = BatchedHistogram
