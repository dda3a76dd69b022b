"""The soak's audit collector, which comes and goes, and the check that no record is lost."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.hec import TOKEN, Collector
from benchmarks.servers import RunningServer
from benchmarks.soak_checks import Check, gauge
from metrics.requests import GENERATION_PATHS

DOWN_S = 5.0
DELIVERY_LIMIT_S = 60.0


class AuditTrail:
    """A file and a collector for the server's records."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "audit.jsonl"
        self.collector = Collector(keep_events=False).start()
        self.restarts = 0

    def flags(self) -> list[str]:
        """For `lapilli serve`."""
        return [
            *("--audit.file", str(self._file), "--audit.hec_url", self.collector.url),
            *("--audit.hec_token", TOKEN, "--audit.hec_ack_timeout_s", "10"),
        ]

    async def keep_restarting(self, every_s: float) -> None:
        """Takes the collector away for DOWN_S seconds, now and then; it comes back with its ids at 0."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(self.collector.stop)
                self.restarts += 1
                await asyncio.sleep(DOWN_S)
                self.collector.start()
        finally:
            if self.collector.server is None:
                self.collector.start()

    async def check(self, server: RunningServer, num_kills: int, concurrency: int) -> Check:
        """Each request that the server counted has a record, and the collector has what the file has.

        A worker that is killed may take the records of its last moment with it: as many as it had requests.
        """
        ends_at = time.monotonic() + DELIVERY_LIMIT_S
        while True:
            written = await asyncio.to_thread(lambda: list(self._records()))
            page = await asyncio.to_thread(_page, server)
            missing = {record["event_id"] for record in written} - set(self.collector.ids)
            if not missing or time.monotonic() > ends_at:
                break
            await asyncio.sleep(1)
        counted = gauge(page, "lapilli_requests_total") or 0
        dropped = gauge(page, "lapilli_audit_dropped_total") or 0
        generation = sum(record.get("path") in GENERATION_PATHS for record in written)
        lost = int(counted) - generation
        passed = not missing and not dropped and bool(written) and lost <= num_kills * concurrency
        what = (
            f"{len(written)} records, {len(missing)} not at the collector ({self.restarts} restarts, "
            f"{len(self.collector.ids) - len(set(self.collector.ids))} came twice), {dropped:g} dropped, "
            f"{lost} of {counted:g} requests without one ({num_kills} workers killed)"
        )
        return Check("audit", passed, what)

    def _records(self) -> Iterator[dict[str, Any]]:
        for file in [*self._file.parent.glob(f"{self._file.name}.[0-9]*"), self._file]:
            with file.open() as lines:
                yield from map(json.loads, lines)


def _page(server: RunningServer) -> str:
    with urllib.request.urlopen(f"{server.admin_url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
