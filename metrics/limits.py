"""Metrics of limits: refusals, what shadow limits would have refused, the store's health."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class LimitMetrics:
    """The `lapilli_limits_*` series of one gateway, and `lapilli_rate_limited_total`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.refused = Counter(
            "lapilli_rate_limited", "Requests refused, by kind of limit.", ["limit"], registry=registry
        )
        self.shadow = Counter(
            "lapilli_limits_shadow",
            "Requests that a shadow limit would have refused.",
            ["limit"],
            registry=registry,
        )
        self.store_errors = Counter(
            "lapilli_limits_store_errors",
            "Requests for which the store could not be asked.",
            registry=registry,
        )
        self.settles_dropped = Counter(
            "lapilli_limits_settles_dropped",
            "Requests whose use was not settled, since too many ended while the store was away.",
            registry=registry,
        )
        self.open = Gauge(
            "lapilli_limits_open_reservations",
            "Requests that hold a reservation.",
            registry=registry,
            multiprocess_mode="livesum",
        )
