"""The /metrics page: the series of all processes together.

Each process writes its values into files of one folder (prometheus_client's multiprocess mode, on when
PROMETHEUS_MULTIPROC_DIR is set before the library is imported); the page adds them up. So counters outlive a
worker that died.
"""

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector


def metrics_page() -> bytes:
    """Prometheus text."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    return generate_latest(registry)
