"""Delivery to a collector that fails, hangs, answers slowly, loses acknowledgements, goes and comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from auth import hec
from auth.hec import HecSender
from auth.spool import Spool
from benchmarks.hec import TOKEN, Collector
from metrics.audit import AuditMetrics


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hec, "BACKOFF_S", 0.02)
    monkeypatch.setattr(hec, "MAX_BACKOFF_S", 0.1)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that works, to begin with."""
    with Collector() as running:
        yield running


class Sending:
    """A spool and its sender, with one segment for each `put`."""

    def __init__(self, spool: Spool, sender: HecSender, metrics: AuditMetrics) -> None:
        self.spool = spool
        self.sender = sender
        self._metrics = metrics
        self.count = 0

    def put(self, segments: int = 1) -> None:
        """Segments of two records each."""
        for _ in range(segments):
            records = [{"event_id": f"{self.count + n:04d}"} for n in range(2)]
            self.count += 2
            self.spool.append([b'{"time":1.5,"event":%b}\n' % orjson.dumps(record) for record in records])

    def value(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self._metrics.registry.get_sample_value(name, labels) or 0.0

    async def until(self, check: Callable[[], object], limit_s: float = 20) -> None:
        """Waits for `check()`."""
        async with asyncio.timeout(limit_s):
            while not check():
                await asyncio.sleep(0.01)

    async def until_delivered(self) -> None:
        """Waits until the spool is empty."""
        await self.until(lambda: self.spool.num_bytes == 0)
        assert not list(self.spool.folder.iterdir())


@asynccontextmanager
async def sending(folder: Path, to: Collector, *, ack: bool = True, **more: object) -> AsyncIterator[Sending]:
    """A sender that runs."""
    spool, metrics = Spool(folder, 1, 10**6), AuditMetrics()
    options = {"timeout_s": 5.0, "ack_timeout_s": 5.0, "poll_s": 0.02, "token": TOKEN} | more
    sender = HecSender(hec.Collector(url=to.url, ack=ack, **options), spool, metrics)  # type: ignore[arg-type]
    running = asyncio.create_task(sender.run())
    try:
        yield Sending(spool, sender, metrics)
    finally:
        sender.stop()
        await running
        await sender.close()


def test_all_is_delivered_once_in_order(collector: Collector, tmp_path: Path) -> None:
    """Nothing goes wrong: nothing comes twice; with acknowledgement, without, and where it was hoped for."""

    async def run(folder: str, *, ack: bool) -> None:
        collector.ids.clear()
        async with sending(tmp_path / folder, collector, ack=ack) as to:
            to.put(100)
            await to.until_delivered()
            assert collector.ids == [f"{n:04d}" for n in range(200)]
            assert to.value("lapilli_audit_records_total", sink="hec") == 200
            assert to.value("lapilli_audit_errors_total", sink="hec") == 0

    asyncio.run(run("a", ack=True))
    collector.acks = False
    asyncio.run(run("b", ack=False))
    asyncio.run(run("c", ack=True))


def test_refused_deliveries_are_tried_again(collector: Collector, tmp_path: Path) -> None:
    """Busy, wrong token, wrong index, too large, too many, broken: nothing is lost, and nothing overtakes."""

    async def run() -> None:
        collector.statuses = [(503, 9), (403, 4), (400, 7), (413, 27), (429, 26), (500, 8), (404, 404)]
        async with sending(tmp_path, collector) as to:
            to.put(3)
            await to.until_delivered()
            assert collector.ids == [f"{n:04d}" for n in range(6)]
            assert to.value("lapilli_audit_errors_total", sink="hec") >= 7

    asyncio.run(run())


def test_what_no_collector_would_take_is_counted(collector: Collector, tmp_path: Path) -> None:
    """A batch that HEC can't read does not stop the others."""

    async def run() -> None:
        collector.statuses = [(400, 6)]
        async with sending(tmp_path, collector) as to:
            to.put(3)
            await to.until_delivered()
            assert collector.ids == [f"{n:04d}" for n in range(2, 6)]
            assert to.value("lapilli_audit_dropped_total", reason="rejected") == 2

    asyncio.run(run())


def test_lost_acknowledgements_and_answers(collector: Collector, tmp_path: Path) -> None:
    """What was taken but never indexed, and what was taken but never answered, is sent again."""

    async def run() -> None:
        collector.forget_acks = 2
        collector.swallow = 1
        async with sending(tmp_path, collector, ack_timeout_s=0.2) as to:
            to.put(6)
            await to.until_delivered()
            assert set(collector.ids) == {f"{n:04d}" for n in range(12)}

    asyncio.run(run())


def test_a_collector_that_hangs_or_is_slow(collector: Collector, tmp_path: Path) -> None:
    """A hanging one is left after the limit; a slow one within it is waited for."""

    async def run() -> None:
        collector.hang = True
        async with sending(tmp_path, collector, timeout_s=0.2) as to:
            to.put(2)
            await to.until(lambda: to.value("lapilli_audit_errors_total", sink="hec") >= 2)
            collector.hang = False
            collector.delay_s = 0.05
            await to.until_delivered()
            assert collector.ids == [f"{n:04d}" for n in range(4)]

    asyncio.run(run())


def test_restarts_of_the_collector(collector: Collector, tmp_path: Path) -> None:
    """Down, up, down again, with acknowledgements of the time before outstanding: all arrives."""

    async def run() -> None:
        async with sending(tmp_path, collector, ack_timeout_s=0.5) as to:
            for _ in range(4):
                collector.forget_acks = 2
                to.put(5)
                before = collector.requests
                await to.until(lambda before=before: collector.requests > before + 2)  # type: ignore[misc]
                collector.stop()
                to.put(5)
                await to.until(lambda: to.spool.num_bytes > 0)
                collector.start()
            await to.until_delivered()
            assert set(collector.ids) == {f"{n:04d}" for n in range(to.count)}
            firsts = list(dict.fromkeys(collector.ids))
            assert len(firsts) == to.count

    asyncio.run(run())


def test_replay_is_in_order(collector: Collector, tmp_path: Path) -> None:
    """What gathered while the collector was away, before a restart of ours too, is sent oldest first."""

    async def run() -> None:
        collector.stop()
        async with sending(tmp_path, collector) as to:
            to.put(10)
            await to.until(lambda: to.value("lapilli_audit_errors_total", sink="hec") >= 1)
        async with sending(tmp_path, collector) as to:
            to.count = 20
            to.put(10)
            collector.start()
            await to.until_delivered()
        assert collector.ids == [f"{n:04d}" for n in range(40)]

    asyncio.run(run())


def test_ack_ids_of_another_life_prove_nothing(collector: Collector, tmp_path: Path) -> None:
    """A collector that restarts between two deliveries, unseen, gives an old id to a new delivery."""

    async def run() -> None:
        async with sending(tmp_path, collector, ack_timeout_s=60) as to:
            collector.forget_acks = 3
            to.put(3)
            await to.until(lambda: collector.requests == 3)
            collector.stop()
            collector.start()
            to.put(1)
            await to.until_delivered()
            assert set(collector.ids) == {f"{n:04d}" for n in range(8)}

    asyncio.run(run())
