"""The audit trail: one record for each request and each admin action, to a file and to Splunk.

`AuditLog.emit` costs some microseconds and never waits: the record is encoded and put into a bounded queue
for each place it goes to (auth/audit_lane.py). What goes to Splunk is spooled on disk first (auth/spool.py)
and sent from there (auth/hec.py), so that it survives this process and the collector's absence.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import orjson
import structlog

from auth.audit_check import SUPERVISOR
from auth.audit_file import RotatingFile
from auth.audit_lane import FileSink, Lane, Record, Sink, SpoolSink
from auth.audit_records import request_record
from auth.hec import Collector, HecSender
from auth.principal import Principal
from auth.spool import Spool, hold_own, orphans
from metrics.audit import AuditMetrics
from server.audit_sections import AuditSettings
from server.context import RequestContext

log = structlog.get_logger()

CLOSE_LIMIT_S = 3.0
ADOPT_EVERY_S = 10.0
SOURCE = "lapilli"


class AuditLog:
    """The trail of one process. Without a file and a collector in the settings it does nothing.

    `open` raises OSError where file or spool can't be made. After `close` nothing is taken.
    """

    def __init__(self, settings: AuditSettings, process: str, metrics: AuditMetrics | None = None) -> None:
        """`process`: its name, `worker-1` or `supervisor`; it names the process's spool."""
        self._settings = settings
        self._process = process
        self.metrics = metrics or AuditMetrics()
        self._lanes: list[Lane] = []
        self._spool: Spool | None = None
        self._sender: HecSender | None = None
        self._held: int | None = None
        self._sending: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def enabled(self) -> bool:
        """Whether records go anywhere."""
        return self._settings.file is not None or self._settings.hec_url is not None

    def open(self) -> None:
        """Opens file and spool."""
        settings = self._settings
        if settings.file is not None:
            file = RotatingFile(settings.file, settings.file_max_bytes, settings.file_keep)
            self._add(FileSink(file, self.metrics))
        if settings.hec_url is not None:
            folder, self._held = hold_own(settings.spool_dir, self._process)
            self._spool = Spool(
                folder, settings.hec_batch_bytes, settings.spool_max_bytes, seal_after_s=settings.hec_delay_s
            )
            self._add(SpoolSink(self._spool, _envelope(settings), self.metrics))

    def _add(self, sink: Sink) -> None:
        self._lanes.append(Lane(sink, self._settings.queue_max_bytes, self.metrics))

    def start(self) -> None:
        """Starts writing and sending, on the running loop."""
        if self._spool is not None:
            self._sender = HecSender(_collector(self._settings), self._spool, self.metrics)
            self._sending = asyncio.create_task(self._sender.run())
            if self._process == SUPERVISOR:
                self._tasks.append(asyncio.create_task(self._keep_adopting()))
        for lane in self._lanes:
            lane.start()
        if self._lanes:
            self._tasks.append(asyncio.create_task(self._keep_counting()))

    def emit(self, record: Mapping[str, Any]) -> None:
        """Takes one record; it is dropped, and counted, where it can't be kept."""
        if not self._lanes:
            return
        try:
            encoded = Record(time.time(), orjson.dumps(record))
        except orjson.JSONEncodeError:
            self.metrics.dropped("unencodable", 1)
            return
        for lane in self._lanes:
            lane.put(encoded)

    def keeps_content(self, principal: Principal | None) -> bool:
        """Whether this caller's records hold prompts and outputs."""
        return principal is not None and principal.tenant in self._settings.content_tenants

    def request_ended(self, ctx: RequestContext, duration_s: float) -> None:
        """Emits the record of a request."""
        if self._lanes:
            self.emit(request_record(ctx, duration_s, self._process))

    async def close(self) -> None:
        """Writes what is queued and sends what goes out within CLOSE_LIMIT_S; the rest stays on disk."""
        for lane in self._lanes:
            await lane.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sender is not None and self._sending is not None:
            self._sender.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self._sending
                    await self._sender.drain()
            self._sending.cancel()
            await self._sender.close()
        self._count()
        self._let_go()

    def write_now(self, record: Mapping[str, Any]) -> None:
        """Writes one record and closes, for a process without a loop; raises OSError."""
        encoded = Record(time.time(), orjson.dumps(record))
        try:
            for lane in self._lanes:
                lane.sink.write([encoded])
        finally:
            for lane in self._lanes:
                lane.sink.close()
            self._let_go()

    def _let_go(self) -> None:
        self._lanes.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    async def _keep_adopting(self) -> None:
        """The supervisor sends what processes left behind that are gone."""
        while True:
            try:
                await asyncio.to_thread(self._adopt)
            except OSError as error:
                log.warning("audit_adoption_failed", reason=error.strerror)
            await asyncio.sleep(ADOPT_EVERY_S)

    def _adopt(self) -> None:
        assert self._spool is not None
        for folder in orphans(self._settings.spool_dir):
            if num_segments := self._spool.adopt(folder):
                log.info("audit_spool_adopted", folder=folder.name, segments=num_segments)

    async def _keep_counting(self) -> None:
        while True:
            self._count()
            await asyncio.sleep(1)

    def _count(self) -> None:
        self.metrics.queue_bytes.set(sum(lane.num_bytes for lane in self._lanes))
        if self._spool is not None:
            self.metrics.spool_bytes.set(self._spool.num_bytes)


def _envelope(settings: AuditSettings) -> bytes:
    """What HEC is told with every event, as the inside of a JSON object that goes on."""
    fields = {"host": socket.gethostname(), "source": SOURCE, "sourcetype": settings.hec_sourcetype}
    if settings.hec_index is not None:
        fields["index"] = settings.hec_index
    return orjson.dumps(fields)[1:-1] + b","


def _collector(settings: AuditSettings) -> Collector:
    assert settings.hec_url is not None
    assert settings.hec_token is not None
    return Collector(
        url=settings.hec_url,
        token=settings.hec_token.get_secret_value(),
        ack=settings.hec_ack,
        timeout_s=settings.hec_timeout_s,
        ack_timeout_s=settings.hec_ack_timeout_s,
        poll_s=min(1.0, settings.hec_delay_s),
        ca_file=settings.hec_ca_file,
    )
