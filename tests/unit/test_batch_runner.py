"""Batches worked on in this process, over an engine that is not there: what decides whether a line runs."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from auth.audit import AuditLog
from auth.database import Database
from auth.identity import Identity
from auth.limiter import Limiter
from auth.services import Offer, Services
from auth.store import KeyStore
from auth.tenants import TenantStore
from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics
from server.audit_sections import AuditSettings
from server.batches.calls import call
from server.batches.files import INPUT_PURPOSE
from server.batches.leases import Leases
from server.batches.runner import BatchRunner
from server.config import Settings
from server.errors import ApiError, unavailable
from server.gateway import Gateway

CHAT = "/v1/chat/completions"


class FakeProtocol:
    """Answers once it may; notes what it was asked."""

    def __init__(self):
        self.asked = []
        self.may_answer = asyncio.Event()
        self.error = None

    async def chat(self, body, ctx):
        assert (ctx.priority, ctx.principal.service_class) == (100, "batch")
        self.asked.append(json.loads(body)["n"])
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return b'{"answer":%d}' % json.loads(body)["n"]


class World:
    """A database with one key of tenant `acme`, and gateways on it that come and go."""

    def __init__(self, url):
        self.url = url
        self.settings = Settings.model_validate(
            {
                "auth": {"database_url": url, "refresh_s": 0.1},
                "batch": {"lease_s": 1, "max_parallel_lines": 4},
                "limits": {"store": "none"},
            }
        )

    async def open(self):
        self.database = Database(self.url)
        await self.database.open()
        await self.database.upgrade()
        self.tenants, self.keys = TenantStore(self.database), KeyStore(self.database)
        await self.tenants.create("acme")
        self.key, self.secret = await self.keys.create("k", "acme")

    @asynccontextmanager
    async def gateway(self):
        """A worker's parts, with its runner running; on leaving it is killed, not drained."""
        identity = Identity(self.settings.auth, self.settings.jwt)
        await identity.start()
        engine = SimpleNamespace(
            ready=True, reason=None, state="ready", max_num_seqs=64, track=lambda _: None
        )
        metrics = RequestMetrics("m")
        limiter = Limiter(self.settings.limits, LimitMetrics(metrics.registry))
        services = Services(None, Offer(("m",), tokens=False))
        audit = AuditLog(AuditSettings(), "worker-1")
        gateway = Gateway(self.settings, identity, services, metrics, audit, engine, limiter)
        gateway.protocol = FakeProtocol()
        runner = BatchRunner(gateway)
        task = asyncio.create_task(runner.run())
        try:
            yield SimpleNamespace(gateway=gateway, protocol=gateway.protocol, runner=runner, engine=engine)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await identity.close()

    async def start(self, here, count, *, window_over=False):
        gateway = here.gateway
        writer = gateway.files.writer("acme", INPUT_PURPOSE, "in.jsonl")
        for number in range(count):
            line = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"n": number}}
            await writer.write(json.dumps(line).encode() + b"\n")
        file = await gateway.files.seal(writer, "acme")
        owner = await gateway.identity.owner("acme", self.key.id, gateway.services.table.plain)
        self.batch = await gateway.batches.create(
            owner, "default", endpoint=CHAT, input_file=file.id, window="24h", metadata=None,
            output_expires_s=None,
        )  # fmt: skip

    async def until(self, here, what, limit_s=60.0):
        for _ in range(int(limit_s / 0.02)):
            batch = await here.gateway.batches.get("acme", self.batch.id)
            if what(batch):
                return batch
            await asyncio.sleep(0.02)
        pytest.fail(f"still {batch.status}")

    async def lines(self, here, file_id):
        if file_id is None:
            return []
        content = b"".join([chunk async for chunk in here.gateway.files.chunks(file_id)])
        return [json.loads(text) for text in content.splitlines()]


def run(url, work):
    async def main():
        world = World(url)
        await world.open()
        try:
            await work(world)
        finally:
            await world.database.close()

    asyncio.run(main())


def ended(batch):
    return batch.ended_at is not None


def test_a_new_start_goes_on_with_the_lines_that_have_no_result(url):
    """Killed in the middle: what was written stays, what was not is asked again, none stands twice."""

    async def work(world):
        async with world.gateway() as first:
            await world.start(first, 10)
            await world.until(first, lambda _: len(first.protocol.asked) == 4)
            first.protocol.may_answer.set()
            await world.until(first, lambda batch: batch.completed >= 4)
            first.protocol.may_answer.clear()
        async with world.gateway() as second:
            second.protocol.may_answer.set()
            batch = await world.until(second, ended)
            assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 10, 10, 0)
            done = await world.lines(second, batch.output_file)
            assert [one["custom_id"] for one in done] == [f"r{number}" for number in range(10)]
            assert [one["response"]["body"]["answer"] for one in done] == list(range(10))
            assert not {0, 1, 2, 3} & set(second.protocol.asked)

    run(url, work)


def test_clients_come_first_and_a_drain_leaves_the_rest(sqlite_url):
    async def work(world):
        async with world.gateway() as here:
            here.gateway.metrics.in_flight = 31  # of 64 sequences, half of which lines may fill up
            here.protocol.may_answer.set()
            here.protocol.may_answer.clear()
            await world.start(here, 3)
            await world.until(here, lambda _: here.protocol.asked)
            await asyncio.sleep(0.2)
            assert here.protocol.asked == [0]
            stopping = asyncio.create_task(here.runner.stop(10))
            await asyncio.sleep(0)
            here.gateway.metrics.in_flight = 0
            here.protocol.may_answer.set()
            await stopping
            batch = await here.gateway.batches.get("acme", world.batch.id)
            assert (batch.status, batch.completed, batch.runner) == ("in_progress", 1, None)
            assert here.protocol.asked == [0]

    run(sqlite_url, work)


def test_a_drain_past_its_limit_cuts_lines_and_lets_go(sqlite_url):
    async def work(world):
        async with world.gateway() as here:
            await world.start(here, 3)
            await world.until(here, lambda _: len(here.protocol.asked) == 3)
            await here.runner.stop(0.05)
            batch = await here.gateway.batches.get("acme", world.batch.id)
            assert (batch.status, batch.completed, batch.runner) == ("in_progress", 0, None)

    run(sqlite_url, work)


@pytest.mark.parametrize("why", ["revoked", "disabled"])
def test_an_owner_who_may_not_go_on_fails_the_batch(sqlite_url, why):
    """What was done is kept, the rest is told as not done."""

    async def work(world):
        async with world.gateway() as here:
            await world.start(here, 8)
            await world.until(here, lambda _: len(here.protocol.asked) == 4)
            here.engine.ready = False  # no line more
            here.protocol.may_answer.set()
            await world.until(here, lambda batch: batch.completed == 4)
            await (world.keys.revoke(world.key.id) if why == "revoked" else world.tenants.disable("acme"))
            batch = await world.until(here, ended)
            code = {"revoked": "invalid_api_key", "disabled": "tenant_disabled"}[why]
            assert (batch.status, batch.errors[0]["code"]) == ("failed", code)
            assert len(await world.lines(here, batch.output_file)) == 4
            undone = await world.lines(here, batch.error_file)
            assert {one["error"]["code"] for one in undone} == {"batch_failed"}
            assert len(undone) == 4

    run(sqlite_url, work)


def test_the_window_ends(sqlite_url, monkeypatch):
    monkeypatch.setattr("server.batches.store.WINDOWS_S", {"24h": 3.0})

    async def work(world):
        async with world.gateway() as here:
            await world.start(here, 5)
            batch = await world.until(here, ended)
            assert (batch.status, batch.completed, batch.failed) == ("expired", 0, 0)
            undone = await world.lines(here, batch.error_file)
            assert [one["custom_id"] for one in undone] == [f"r{number}" for number in range(5)]
            assert {one["error"]["code"] for one in undone} == {"batch_expired"}

    run(sqlite_url, work)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (unavailable("The engine has stopped."), 3),
        (ApiError(429, "Over.", headers={"Retry-After": "9", "x-should-retry": "false"}), 1),
        (RuntimeError("secret"), 1),
    ],
)
def test_lines_that_fail(sqlite_url, error, tries):
    """503 is tried again, but not for ever: the line may be what ends the engine."""

    async def work(world):
        async with world.gateway() as here:
            here.protocol.error = error
            here.protocol.may_answer.set()
            await world.start(here, 1)
            batch = await world.until(here, ended)
            assert (batch.status, batch.completed, batch.failed) == ("completed", 0, 1)
            assert len(here.protocol.asked) == tries
            (line,) = await world.lines(here, batch.error_file)
            assert line["response"]["status_code"] == getattr(error, "status", 500)
            assert "secret" not in json.dumps(line)

    run(sqlite_url, work)


def test_a_slow_write_is_waited_for(sqlite_url, monkeypatch):
    """Results that are being written when the last line ends are part of the batch."""
    add = Leases.add

    async def slow(leases, *args, **kwargs):
        await asyncio.sleep(0.3)
        return await add(leases, *args, **kwargs)

    async def work(world):
        monkeypatch.setattr("server.batches.work.KEEP_S", 0.001)
        monkeypatch.setattr(Leases, "add", slow)
        async with world.gateway() as here:
            here.protocol.may_answer.set()
            await world.start(here, 3)
            batch = await world.until(here, ended)
            assert (batch.status, batch.completed) == ("completed", 3)
            assert len(await world.lines(here, batch.output_file)) == 3

    run(sqlite_url, work)


def test_a_line_that_breaks_is_asked_again(sqlite_url, monkeypatch):
    """A fault of ours costs a turn, no line."""
    broken = iter([True])

    async def breaking(*args):
        if next(broken, False):
            raise ValueError
        return await call(*args)

    async def work(world):
        monkeypatch.setattr("server.batches.work.call", breaking)
        monkeypatch.setattr("server.batches.runner.RETRY_S", 0.05)
        async with world.gateway() as here:
            here.protocol.may_answer.set()
            await world.start(here, 3)
            batch = await world.until(here, ended)
            assert (batch.status, batch.completed) == ("completed", 3)
            assert set(here.protocol.asked) == {0, 1, 2}

    run(sqlite_url, work)


def test_a_worker_that_lost_its_lease_writes_nothing(sqlite_url):
    async def work(world):
        async with world.gateway() as here:
            await world.start(here, 2)
            await world.until(here, lambda _: len(here.protocol.asked) == 2)
            async with world.database.writing() as connection:
                await connection.exec_driver_sql("UPDATE batches SET runner = 'other'")
            here.protocol.may_answer.set()
            await asyncio.sleep(0.6)
            other = Leases(world.database, "other", here.gateway.settings.engine.public_model_name, 1)
            assert await other.done(world.batch.id) == set()
            await other.finish(world.batch.id, "completed")

    run(sqlite_url, work)
