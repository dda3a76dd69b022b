"""Metrics of the audit trail: what was written where, what waits, what was dropped."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class AuditMetrics:
    """The `lapilli_audit_*` series of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._records = Counter(
            "lapilli_audit_records",
            "Audit records delivered, by where to: file or hec.",
            ["sink"],
            registry=self.registry,
        )
        self._dropped = Counter(
            "lapilli_audit_dropped", "Audit records lost, by why.", ["reason"], registry=self.registry
        )
        self._errors = Counter(
            "lapilli_audit_errors",
            "Failed tries to write or deliver, by where to: file, spool or hec.",
            ["sink"],
            registry=self.registry,
        )
        self.queue_bytes = self._gauge("queue", "Audit records in memory, not written yet.")
        self.spool_bytes = self._gauge("spool", "Audit records on disk that the collector does not have.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"lapilli_audit_{name}_bytes", text, registry=self.registry, multiprocess_mode="livesum")

    def delivered(self, sink: str, num_records: int) -> None:
        """`num_records` have reached `sink`."""
        self._records.labels(sink).inc(num_records)

    def dropped(self, reason: str, num_records: int) -> None:
        """`num_records` are lost; `reason`: queue_full, spool_full, rejected, unencodable or shutdown."""
        self._dropped.labels(reason).inc(num_records)

    def failed(self, sink: str) -> None:
        """A try failed; it is made again."""
        self._errors.labels(sink).inc()
