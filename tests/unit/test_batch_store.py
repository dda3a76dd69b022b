"""Files, batches and leases in the database; SQLite and PostgreSQL."""

import asyncio
import itertools
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import func, select, update

from auth import records
from auth.database import Database
from auth.principal import Principal
from auth.schema import batch_results, batches, file_chunks, files
from server.batches.files import CHUNK_BYTES, FileInUse, FileStore, NoSpace, UnknownFile, clean_filename
from server.batches.leases import LeaseLost, Leases, Result, prune
from server.batches.store import BatchStore, CannotCancel, TooManyBatches, UnknownBatch
from server.sections import BatchSettings

OWNER = Principal("acme", "key_1", "k")
SETTINGS = BatchSettings(max_stored_mib=2, max_open_batches=3)
CHAT = "/v1/chat/completions"


def run(url, work):
    async def opened():
        database = Database(url)
        await database.open()
        try:
            await database.upgrade()
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(opened())


async def upload(database, content=b"{}\n", tenant="acme", **more):
    store = FileStore(database, SETTINGS)
    writer = store.writer(tenant, "batch", "in.jsonl", **more)
    for start in range(0, len(content), 100_000):
        await writer.write(content[start : start + 100_000])
    return await store.seal(writer, tenant)


async def create(database, owner=OWNER, content=b"{}\n", model="m"):
    file = await upload(database, content, owner.tenant)
    return await BatchStore(database, SETTINGS, model).create(
        owner, "default", endpoint=CHAT, input_file=file.id, window="24h", metadata=None,
        output_expires_s=None,
    )  # fmt: skip


async def count(database, table):
    async with database.reading() as connection:
        return (await connection.execute(select(func.count()).select_from(table))).scalar_one()


async def read(database, file_id):
    return b"".join([chunk async for chunk in FileStore(database, SETTINGS).chunks(file_id)])


def test_files(url):
    content = bytes(range(256)) * 4000  # more than a chunk

    async def work(database):
        store = FileStore(database, SETTINGS)
        assert len(content) > CHUNK_BYTES
        file = await upload(database, content)
        assert await read(database, file.id) == content
        assert (await store.get("acme", file.id)).bytes == len(content)
        for call in (store.get, store.delete):
            for tenant, file_id in (("other", file.id), ("acme", "file-" + "0" * 32), ("acme", "\0")):
                with pytest.raises(UnknownFile):
                    await call(tenant, file_id)
        unfinished = store.writer("acme", "batch", "x")
        await unfinished.write(b"half")
        await unfinished.flush()
        with pytest.raises(UnknownFile):
            await store.get("acme", unfinished.id)
        with pytest.raises(NoSpace):
            await upload(database, content * 2)
        await upload(database, content * 2, "other")
        await store.delete("acme", file.id)
        with pytest.raises(UnknownFile):
            await store.get("acme", file.id)

    run(url, work)


def test_pages_of_files_and_batches(url):
    async def work(database):
        ids = [(await upload(database)).id for _ in range(5)]
        await upload(database, tenant="other")
        store = FileStore(database, SETTINGS)
        for descending in (True, False):
            seen, after, more = [], None, True
            while more:
                found, more = await store.list(
                    "acme", purpose="batch", after=after, limit=2, descending=descending
                )
                seen += [file.id for file in found]
                after = seen[-1]
            assert sorted(seen) == sorted(ids)
        assert await store.list("acme", purpose="\0", after=None, limit=2, descending=True) == ([], False)
        with pytest.raises(UnknownFile):
            await store.list("other", purpose=None, after=ids[0], limit=2, descending=True)
        made = [(await create(database)).id for _ in range(3)]
        api = BatchStore(database, SETTINGS, "m")
        first, more = await api.list("acme", after=None, limit=2)
        rest, no_more = await api.list("acme", after=first[-1].id, limit=2)
        assert (more, no_more) == (True, False)
        assert sorted(batch.id for batch in first + rest) == sorted(made)
        assert await api.list("other", after=None, limit=2) == ([], False)
        with pytest.raises(TooManyBatches):
            await create(database)

    run(url, work)


def test_cancel_and_input_in_use(url):
    async def work(database):
        api, batch = BatchStore(database, SETTINGS, "m"), await create(database)
        with pytest.raises(UnknownBatch):
            await api.cancel("other", batch.id)
        with pytest.raises(UnknownFile):
            await FileStore(database, SETTINGS).delete("other", batch.input_file)
        with pytest.raises(FileInUse):
            await FileStore(database, SETTINGS).delete("acme", batch.input_file)
        for _ in range(2):
            assert (await api.cancel("acme", batch.id)).status == "cancelling"
        leases = Leases(database, "a", "m", 30)
        assert (await leases.claim()).id == batch.id
        await leases.finish(batch.id, "cancelled")
        assert (await api.cancel("acme", batch.id)).status == "cancelled"
        await FileStore(database, SETTINGS).delete("acme", batch.input_file)
        other = await create(database)
        await leases.claim()
        await leases.finish(other.id, "completed")
        with pytest.raises(CannotCancel, match="completed"):
            await api.cancel("acme", other.id)

    run(url, work)


def test_claims_go_round_between_tenants_and_leave_other_models_alone(url):
    async def work(database):
        first, second = await create(database), await create(database)
        theirs = await create(database, Principal("other", "key_2", "k"))
        await create(database, Principal("third", "key_3", "k"), model="another")
        a, b, c, d = (Leases(database, name, "m", 30) for name in "abcd")
        assert [(await leases.claim()).id for leases in (a, b, c)] == [first.id, theirs.id, second.id]
        assert await d.claim() is None
        assert not await d.others_wait()
        await a.release(first.id)
        assert await d.others_wait()
        assert (await d.claim()).id == first.id
        with pytest.raises(LeaseLost):
            await a.renew(first.id)

    run(url, work)


def test_prune_takes_what_is_over_and_nothing_else(url):
    async def work(database):
        kept, old, running = await upload(database), await upload(database), await create(database)
        ended = await create(database)
        leases = Leases(database, "a", "m", 30)
        async with database.writing() as connection:
            past = records.later(-40 * 24 * 3600)
            for file_id in (old.id, running.input_file):
                await connection.execute(update(files).where(files.c.id == file_id).values(expires_at=past))
            await connection.execute(
                update(batches).where(batches.c.id == ended.id).values(ended_at=past, status="completed")
            )
        assert await prune(database, 30) == 1
        assert await read(database, old.id) == b""
        assert await read(database, kept.id) == await read(database, running.input_file) == b"{}\n"
        with pytest.raises(UnknownBatch):
            await BatchStore(database, SETTINGS, "m").get("acme", ended.id)
        assert (await leases.claim()).id == running.id
        assert await count(database, file_chunks) == await count(database, files) == 3

    run(url, work)


def test_filenames():
    assert clean_filename("../../etc/pass\nwd") == "pass_wd"
    assert clean_filename("C:\\x\\in.jsonl") == "in.jsonl"
    assert clean_filename("") == clean_filename("a/") == "file"
    assert len(clean_filename("x" * 1000)) == 255


class LeaseMachine(RuleBasedStateMachine):
    """Two workers, one batch of ten lines, leases that run out at any moment."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.database = Database(f"sqlite+aiosqlite:///{self.folder.name}/db")
        self.loop.run_until_complete(self._open())
        self.holder = self.last = None
        self.results = {}
        self.numbers = itertools.count(1)
        self.ended = False

    async def _open(self):
        await self.database.open()
        await self.database.upgrade()
        self.batch = await create(self.database)
        self.leases = {name: Leases(self.database, name, "m", 30) for name in "ab"}

    def teardown(self):
        self.loop.run_until_complete(self.database.close())
        self.loop.close()
        self.folder.cleanup()

    def do(self, work):
        return self.loop.run_until_complete(work)

    @rule(name=st.sampled_from("ab"))
    def claim(self, name):
        found = self.do(self.leases[name].claim())
        assert (found is not None) == (self.holder is None and not self.ended)
        if found is not None:
            self.holder = name

    @rule()
    def lease_runs_out(self):
        async def past():
            async with self.database.writing() as connection:
                await connection.execute(update(batches).values(lease_until=records.later(-1)))

        if self.holder is not None:
            self.do(past())
            self.last, self.holder = self.holder, None

    @rule(name=st.sampled_from("ab"), ok=st.booleans())
    def add(self, name, ok):
        number = next(self.numbers)
        if self.fails(name, self.leases[name].add(self.batch.id, [Result(number, ok, b"%d" % number)])):
            return
        self.holder = name  # a lease that ran out and that nobody took is its holder's again
        self.results[number] = ok

    @rule(name=st.sampled_from("ab"))
    def release(self, name):
        self.do(self.leases[name].release(self.batch.id))
        if self.holder == name:
            self.holder = None
        if self.last == name:
            self.last = None

    @rule(name=st.sampled_from("ab"))
    def finish(self, name):
        if len(self.results) > 2 and not self.fails(
            name, self.leases[name].finish(self.batch.id, "completed")
        ):
            self.ended, self.holder, self.last = True, None, None

    def fails(self, name, work):
        """Whether `work` is refused, as it has to be for who was followed by another worker."""
        allowed = not self.ended and (self.holder or self.last) == name
        try:
            self.do(work)
        except LeaseLost:
            assert not allowed
            return True
        assert allowed
        return False

    @invariant()
    def counts_are_those_of_the_results(self):
        async def look():
            async with self.database.reading() as connection:
                row = (await connection.execute(select(batches))).one()
                kept = (await connection.execute(select(batch_results.c.number))).scalars().all()
                return row, set(kept)

        row, kept = self.do(look())
        assert row.completed == sum(self.results.values())
        assert row.completed + row.failed == len(self.results)
        assert kept == (set() if self.ended else set(self.results))
        assert (row.status == "completed") == self.ended


LeaseMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestLeases = LeaseMachine.TestCase
