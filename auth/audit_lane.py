"""From the request path to a file or a spool: a bounded queue in memory, written out by threads."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog

from auth.audit_file import RotatingFile
from auth.spool import Spool, SpoolFull
from metrics.audit import AuditMetrics

log = structlog.get_logger()

FLUSH_S = 0.05
"""How long a record waits for others; what `kill -9` can lose."""
RETRY_S = 1.0
BATCH_BYTES = 2**20


class Record(NamedTuple):
    """One encoded record: seconds since 1970, and a JSON object without newlines."""

    time_s: float
    line: bytes


class Sink(Protocol):
    """A place that records go to; both methods block."""

    name: str

    def write(self, records: Sequence[Record]) -> None:
        """Takes all of them, or none and raises OSError."""

    def close(self) -> None:
        """Lets go of files."""


class Lane:
    """Records on their way to one sink: a queue in memory, and the task that empties it."""

    def __init__(self, sink: Sink, max_bytes: int, metrics: AuditMetrics) -> None:
        self.sink = sink
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._queue: deque[Record] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task."""
        self._task = asyncio.create_task(self._run())

    def put(self, record: Record) -> None:
        """Takes a record; a full queue drops the new one."""
        size = len(record.line)
        if self._closing or self.num_bytes + size > self._max_bytes:
            self._metrics.dropped("shutdown" if self._closing else "queue_full", 1)
            return
        self.num_bytes += size
        self._queue.append(record)
        self._wake.set()

    async def close(self) -> None:
        """Writes what is queued, once more where that fails, and closes the sink."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if self._queue:
            self._metrics.dropped("shutdown", len(self._queue))
        await asyncio.to_thread(self.sink.close)

    async def _run(self) -> None:
        failing = False
        while not self._closing or self._queue:
            await self._wake.wait()
            if not self._closing:
                await asyncio.sleep(RETRY_S if failing else FLUSH_S)
            try:
                while self._queue:
                    await self._write_batch()
                failing = False
                self._wake.clear()
                if self._closing:
                    return
            except OSError as error:
                if not failing:
                    log.error("audit_not_written", sink=self.sink.name, reason=error.strerror)
                failing = True
                self._metrics.failed(self.sink.name)
                if self._closing:
                    return

    async def _write_batch(self) -> None:
        """Writes the oldest records; they leave the queue once they are written."""
        batch: list[Record] = []
        size = 0
        for record in self._queue:
            if size >= BATCH_BYTES:
                break
            batch.append(record)
            size += len(record.line)
        await asyncio.to_thread(self.sink.write, batch)
        for _ in batch:
            self._queue.popleft()
        self.num_bytes -= size


class FileSink:
    """The JSONL file."""

    name = "file"

    def __init__(self, file: RotatingFile, metrics: AuditMetrics) -> None:
        self._file = file
        self._metrics = metrics

    def write(self, records: Sequence[Record]) -> None:
        self._file.write(b"".join(record.line + b"\n" for record in records))
        self._metrics.delivered(self.name, len(records))

    def close(self) -> None:
        self._file.close()


class SpoolSink:
    """The spool, in HEC's form: one event object a line."""

    name = "spool"

    def __init__(self, spool: Spool, envelope: bytes, metrics: AuditMetrics) -> None:
        self._spool = spool
        self._envelope = envelope
        self._metrics = metrics

    def write(self, records: Sequence[Record]) -> None:
        try:
            self._spool.append([self._event(record) for record in records])
        except SpoolFull:
            self._metrics.dropped("spool_full", len(records))

    def _event(self, record: Record) -> bytes:
        return b'{"time":%.3f,%b"event":%b}\n' % (record.time_s, self._envelope, record.line)

    def close(self) -> None:
        self._spool.close()
