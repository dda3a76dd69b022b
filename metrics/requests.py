"""Metrics of requests: TTFT, TPOT, gaps, the engine's own phases, tokens, outcomes.

All times are seconds. TTFT counts from the arrival of the request's headers, so it holds authentication,
parsing, rendering and queueing. TPOT is (last token - first token) / (tokens - 1): the first is excluded.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from metrics.batched import BatchedHistogram
from server.context import RequestContext

# A `_created` series beside each counter tells nobody here anything.
disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    *(1.2, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""1 ms to 10 min, with edges at the SLO limits of the dashboards (120, 300, 800 ms and 1.2 s)."""

GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
)
"""What takes the engine's time, by path: counted and limited in flight."""


class RequestMetrics:
    """The `lapilli_*` series of one gateway. Each instance has a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.ttft = self._histogram("time_to_first_token", "Arrival of the request to its first token.")
        self.tpot = self._histogram("time_per_output_token", "Mean time per output token after the first.")
        self._gaps = self._batched("inter_token", "Gap between two tokens of one stream.")
        self._lag = self._batched("engine_output_lag", "From the engine's step to the gateway's work on it.")
        self.lag = self._lag.observe
        """Called with seconds, once for each engine step."""
        self.duration = self._histogram(
            "request_duration", "Arrival of the request to the end of its answer."
        )
        self.queue = self._histogram("request_queue", "Time the request waited in the engine's queue.")
        self.prefill = self._histogram("request_prefill", "Scheduling to first token, in the engine.")
        self.decode = self._histogram("request_decode", "First to last token, in the engine.")
        self._tokens_in = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._tokens_out = self._counter(
            "completion_tokens", "Output tokens, those of unfinished requests too."
        )
        self._requests = Counter(
            "lapilli_requests",
            "Generation requests by how they ended.",
            ["model", "endpoint", "outcome"],
            registry=self.registry,
        )
        self._lines = Counter(
            "lapilli_batch_lines",
            "Requests of batches by how they ended.",
            ["model", "endpoint", "outcome"],
            registry=self.registry,
        )
        self._lines_in_flight = Gauge(
            "lapilli_batch_lines_in_flight",
            "Requests of batches being worked on.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.in_flight = 0
        """Generation requests being served by this process."""
        self._in_flight = Gauge(
            "lapilli_requests_in_flight",
            "Generation requests being served.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        family = Histogram(
            f"lapilli_{name}_seconds", text, ["model"], registry=self.registry, buckets=BUCKETS_S
        )
        return family.labels(self._model)

    def _batched(self, name: str, text: str) -> BatchedHistogram:
        family = BatchedHistogram(
            f"lapilli_{name}_seconds", text, ["model"], registry=self.registry, buckets=BUCKETS_S
        )
        return family.labels(self._model)

    def gap(self, gap_s: float, num_tokens: int) -> None:
        """One gap of a stream; a step that brought several tokens counts one equal gap for each."""
        self._gaps.observe_many(gap_s / num_tokens, num_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"lapilli_{name}", text, ["model"], registry=self.registry).labels(self._model)

    def begin(self, ctx: RequestContext) -> None:
        """A request has arrived."""
        if ctx.path in GENERATION_PATHS:
            self.in_flight += 1
            self._in_flight.set(self.in_flight)

    def end(self, ctx: RequestContext, duration_s: float) -> None:
        """A request has ended, however it ended; called once for each `begin`."""
        if ctx.path not in GENERATION_PATHS:
            return
        self.in_flight -= 1
        self._in_flight.set(self.in_flight)
        self._gaps.flush()  # all figures of a request are there when it has ended
        self._requests.labels(self._model, ctx.path, ctx.final_outcome()).inc()
        self.duration.observe(duration_s)
        self._tokens_in.inc(ctx.prompt_tokens)
        self._tokens_out.inc(ctx.completion_tokens)
        for histogram, value in (
            (self.ttft, ctx.ttft_s),
            (self.tpot, ctx.tpot_s),
            (self.queue, ctx.queue_s),
            (self.prefill, ctx.prefill_s),
            (self.decode, ctx.decode_s),
        ):
            if value is not None:
                histogram.observe(value)

    def begin_line(self) -> None:
        """Work on a batch's request begins."""
        self._lines_in_flight.inc()

    def end_line(self, ctx: RequestContext) -> None:
        """It has ended. Its tokens count as all others; its times nowhere: nobody waited for them."""
        self._lines_in_flight.dec()
        self._lines.labels(self._model, ctx.path, ctx.final_outcome()).inc()
        self._tokens_in.inc(ctx.prompt_tokens)
        self._tokens_out.inc(ctx.completion_tokens)
