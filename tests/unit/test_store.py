"""Tenants and keys in the database, and the cache that checks keys: over SQLite and over PostgreSQL."""

import asyncio
import re
import sqlite3
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import event

from auth.cache import RETRY_S, KeyCache
from auth.database import Database
from auth.errors import KeyStoreUnavailable, TenantDisabled
from auth.keys import hash_key, is_key, new_key
from auth.principal import Limits, Principal
from auth.records import KeyIsDead, TenantExists, UnknownKey, UnknownTenant, later
from auth.store import KeyStore
from auth.tenants import TenantStore


class Clock:
    """A clock that tests move by hand."""

    def __init__(self, now_s=0.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@dataclass
class Parts:
    """Everything over one database."""

    database: Database
    keys: KeyStore
    tenants: TenantStore
    cache: KeyCache
    clock: Clock
    wall: Clock

    async def known(self, secret):
        """Whose key it is once the cache has had to ask again."""
        self.clock.now_s += 2.0
        return await self.cache.authenticate(secret)


@asynccontextmanager
async def opened(url, **options):
    database = Database(url)
    await database.open()
    await database.upgrade()
    clock, wall = Clock(), Clock(time.time())
    cache = KeyCache(database, refresh_s=2.0, clock=clock, wall_clock=wall, **options)
    try:
        yield Parts(database, KeyStore(database), TenantStore(database), cache, clock, wall)
    finally:
        await database.close()


@asynccontextmanager
async def counted(database):
    """Counts the statements that reach the database."""
    statements = []
    engine = database._engine.sync_engine

    def note(_connection, _cursor, statement, *_rest):
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


# --- what people do ---


def test_key_from_creation_to_revocation(url):
    async def run():
        async with opened(url) as parts:
            key, secret = await parts.keys.create("team a")
            assert is_key(secret)
            assert secret.startswith(key.prefix)
            assert len(key.prefix) == 12
            assert re.fullmatch(r"key_[0-9a-f]{12}", key.id)
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", key.created_at)
            assert await parts.keys.list() == [key]
            principal = await parts.cache.authenticate(secret)
            assert principal == Principal(
                "default", key.id, "team a", cache_group="tenant:default", cache_salt=principal.cache_salt
            )
            assert await parts.cache.authenticate(new_key()) is None
            revoked = await parts.keys.revoke(key.id)
            assert revoked.revoked_at >= key.created_at
            assert await parts.known(secret) is None
            assert await parts.keys.revoke(key.id) == revoked
            for call in (
                parts.keys.revoke("key_none"),
                parts.keys.change("key_none"),
                parts.keys.rotate("x"),
            ):
                with pytest.raises(UnknownKey):
                    await call
            for call in (parts.keys.change(key.id, name="b"), parts.keys.rotate(key.id)):
                with pytest.raises(KeyIsDead):
                    await call

    asyncio.run(run())


def test_everything_set_on_tenant_and_key_reaches_the_principal(url):
    async def run():
        async with opened(url) as parts:
            tenant = await parts.tenants.create(
                "acme", service_class="interactive", weight=2.5, limits={"tokens_per_day": 10**9},
                cache_group="shared",
            )  # fmt: skip
            assert [t.name for t in await parts.tenants.list()] == ["acme", "default"]
            assert (await parts.tenants.list())[0] == tenant
            with pytest.raises(TenantExists):
                await parts.tenants.create("acme")
            with pytest.raises(UnknownTenant):
                await parts.keys.create("a", "nobody")
            key, secret = await parts.keys.create(
                "ci", "acme", services=["chat", "chat"], scopes=["s:b", "s:a"],
                limits={"requests_per_s": None, "parallel_requests": 3}, expires_at="2999-01-31",
            )  # fmt: skip
            assert key.expires_at == "2999-01-31T00:00:00.000Z"
            assert await parts.keys.list("acme") == [key]
            assert await parts.keys.list("default") == []
            found = await parts.cache.authenticate(secret)
            assert found == Principal(
                "acme", key.id, "ci", "interactive", 2.5, frozenset({"s:a", "s:b"}), frozenset({"chat"}),
                Limits(tokens_per_day=10**9), Limits(requests_per_s=None, parallel_requests=3),
                "group:shared", found.cache_salt,
            )  # fmt: skip
            await parts.tenants.change("acme", weight=1, limits={"requests_per_min": 5}, cache_group=None)
            await parts.keys.change(key.id, services=None, limits={})
            changed = await parts.known(secret)
            assert changed == replace(
                found, weight=1.0, services=None, tenant_limits=Limits(requests_per_min=5),
                key_limits=Limits(), cache_group="tenant:acme", cache_salt=changed.cache_salt,
            )  # fmt: skip
            with pytest.raises(UnknownTenant):
                await parts.tenants.change("nobody", weight=1)

    asyncio.run(run())


def test_rotation_keeps_the_old_secret_for_the_overlap_alone(url):
    async def run():
        async with opened(url) as parts:
            key, first = await parts.keys.create("a")
            assert await parts.cache.authenticate(first)
            rotated, second = await parts.keys.rotate(key.id, 60)
            assert rotated.id == key.id
            assert second.startswith(rotated.prefix)
            assert (await parts.known(first)).key_id == (await parts.cache.authenticate(second)).key_id
            parts.wall.now_s += 59
            assert await parts.cache.authenticate(first)
            parts.wall.now_s += 2
            assert await parts.cache.authenticate(first) is None, "expired in the cache"
            assert await parts.cache.authenticate(first) is None, "expired in the database"
            assert await parts.cache.authenticate(second)
            # Two more within one overlap: only the last two secrets are good.
            _, third = await parts.keys.rotate(key.id, 3600)
            assert await parts.known(second)
            _, fourth = await parts.keys.rotate(key.id, 3600)
            assert await parts.known(second) is None
            assert await parts.cache.authenticate(third)
            assert await parts.cache.authenticate(fourth)
            _, fifth = await parts.keys.rotate(key.id, 0)
            assert await parts.known(fourth) is None
            await parts.keys.revoke(key.id)
            assert await parts.known(fifth) is None

    asyncio.run(run())


def test_expiry(url):
    async def run():
        async with opened(url) as parts:
            _, secret = await parts.keys.create("a", expires_at=later(60))
            _, other = await parts.keys.create("b", expires_at=later(60))
            assert await parts.cache.authenticate(secret)
            parts.wall.now_s += 61
            assert await parts.cache.authenticate(secret) is None
            assert await parts.cache.authenticate(other) is None

    asyncio.run(run())


def test_disabled_tenant(url):
    async def run():
        async with opened(url) as parts:
            await parts.tenants.create("acme")
            _, secret = await parts.keys.create("a", "acme")
            _, others = await parts.keys.create("b")
            assert await parts.cache.authenticate(secret)
            assert (await parts.tenants.disable("acme")).disabled_at
            for _ in range(2):
                with pytest.raises(TenantDisabled):
                    await parts.known(secret)
            with pytest.raises(TenantDisabled):
                await parts.cache.tenant("acme")
            async with counted(parts.database) as statements:
                with pytest.raises(TenantDisabled):
                    await parts.cache.authenticate(secret)
                assert await parts.cache.authenticate(others)
            assert len(statements) == 2, "the other tenant and its key alone were looked up"
            assert (await parts.tenants.enable("acme")).disabled_at is None
            assert await parts.known(secret)
            assert (await parts.cache.tenant("acme")).name == "acme"
            assert await parts.cache.tenant("nobody") is None

    asyncio.run(run())


BAD_KEYS = [
    *({"name": name} for name in ("", "  ", "a" * 101, "a\nb", "a\x1b[31m", 5)),
    *({"expires_at": text} for text in ("2001-01-01", "soon", "", 5, "9999-12-31T23:59:59-12:00")),
    *({"services": value} for value in ("chat", ["A"], [1], ["a"] * 65, {"a": 1})),
    *({"scopes": value} for value in ("a", ["a b"], ['"'], [""], ["é"])),
    *({"limits": value} for value in ([], {"x": 1}, {1: 1}, {"tokens_per_min": -1})),
    {"nothing": 1},
]
BAD_TENANTS = [
    *({"weight": value} for value in (0, -1, float("nan"), float("inf"), "1", True, 1001)),
    {"service_class": "gold"},
    {"cache_group": "A B"},
    {"budget": 1},
]


def test_bad_values_are_refused_in_one_line(sqlite_url):
    async def run():
        async with opened(sqlite_url) as parts:
            for values in BAD_KEYS:
                with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
                    await parts.keys.create(values.pop("name", "a"), **values)
            for values in BAD_TENANTS:
                with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
                    await parts.tenants.create("acme", **values)
            for name in ("", "A", "a b", "-a", "a" * 65, "é", "a\n"):
                with pytest.raises(ValueError, match="a tenant's name has"):
                    await parts.tenants.create(name)
            for overlap_s in (-1, float("nan"), 1e12):
                with pytest.raises(ValueError, match="the overlap is"):
                    await parts.keys.rotate("x", overlap_s)

    asyncio.run(run())


def test_first_key_only_in_an_empty_table(url):
    async def run():
        async with opened(url) as parts:
            secret = await parts.keys.ensure_first_key()
            first = await parts.cache.authenticate(secret)
            assert (first.tenant, first.key_id, first.key_name) == ("default", "key_first", "first")
            assert await parts.keys.ensure_first_key() is None
            await parts.keys.revoke("key_first")
            assert await parts.keys.ensure_first_key() is None

    asyncio.run(run())


def test_servers_that_start_together_make_one_first_key(url):
    """Eight, over connections of their own: they migrate an empty database and all ask for the first key."""

    async def start():
        async with opened(url) as parts:
            return await parts.keys.ensure_first_key()

    async def run():
        secrets = [secret for secret in await asyncio.gather(*[start() for _ in range(8)]) if secret]
        assert len(secrets) == 1
        async with opened(url) as parts:
            assert (await parts.cache.authenticate(secrets[0])).key_name == "first"
            assert len(await parts.keys.list()) == 1

    asyncio.run(run())


def test_no_secret_on_disk_and_files_are_private(sqlite_url, tmp_path):
    async def run():
        async with opened(sqlite_url) as parts:
            key, secret = await parts.keys.create("b")
            secrets = [await parts.keys.ensure_first_key() or new_key(), secret]
            secrets.append((await parts.keys.rotate(key.id))[1])
            files = list((tmp_path / "state" / "lapilli").iterdir())
            content = b"".join(file.read_bytes() for file in files)
            return secrets, content, files, [file.stat().st_mode & 0o077 for file in files]

    secrets, content, files, open_bits = asyncio.run(run())
    assert {file.name for file in files} == {"keys.db", "keys.db-wal", "keys.db-shm"}
    assert open_bits == [0, 0, 0]
    assert (tmp_path / "state" / "lapilli").stat().st_mode & 0o077 == 0
    for secret in secrets[1:]:
        assert secret.encode() not in content
        assert secret[12:].encode() not in content
        assert hash_key(secret).encode() in content


# --- the cache ---


def test_known_key_costs_no_database_call_until_refresh(url):
    async def run():
        async with opened(url) as parts:
            _, secret = await parts.keys.create("a")
            await parts.cache.authenticate(secret)
            async with counted(parts.database) as statements:
                parts.clock.now_s = 1.9
                for _ in range(100):
                    assert await parts.cache.authenticate(secret)
                assert statements == []
                parts.clock.now_s = 2.0
                await asyncio.gather(*[parts.cache.authenticate(secret) for _ in range(100)])
                assert len(statements) == 1

    asyncio.run(run())


def test_new_keys_and_last_use_drop_nothing(url):
    async def run():
        async with opened(url) as parts:
            key, secret = await parts.keys.create("a")
            assert await parts.cache.authenticate(secret)
            await parts.keys.create("b")
            await parts.cache.write_last_use()
            used = {k.id: k.last_used_at for k in await parts.keys.list()}
            assert used.pop(key.id) is not None
            assert list(used.values()) == [None]
            async with counted(parts.database) as statements:
                assert await parts.known(secret)
            assert len(statements) == 1
            await parts.keys.revoke(key.id)
            assert await parts.known(secret) is None

    asyncio.run(run())


def test_requests_with_one_new_key_share_one_look_up(url):
    async def run():
        async with opened(url) as parts:
            _, warm = await parts.keys.create("a")
            assert await parts.cache.authenticate(warm)
            _, secret = await parts.keys.create("b")
            async with counted(parts.database) as statements:
                assert all(await asyncio.gather(*[parts.cache.authenticate(secret) for _ in range(50)]))
            assert len(statements) == 1

    asyncio.run(run())


def test_unknown_keys_leave_nothing_in_memory_and_known_ones_are_bounded(sqlite_url):
    async def run():
        async with opened(sqlite_url, max_keys=3) as parts:
            for _ in range(50):
                assert await parts.cache.authenticate(new_key()) is None
            assert parts.cache._keys == {}
            assert parts.cache._pending == {}
            async with counted(parts.database) as statements:
                for text in ("", "sk-1", "é", "a" * 100_000):
                    assert await parts.cache.authenticate(text) is None
                assert statements == []
            secrets = [(await parts.keys.create("a"))[1] for _ in range(5)]
            for secret in secrets * 2:
                assert await parts.cache.authenticate(secret)
            assert len(parts.cache._keys) == 3

    asyncio.run(run())


def test_keep_fresh_spares_requests_the_query(sqlite_url):
    """The background refresh sees a revocation by itself; a request after it need not ask."""

    async def run():
        database = Database(sqlite_url)
        await database.open()
        await database.upgrade()
        keys, cache = KeyStore(database), KeyCache(database, refresh_s=0.4)
        key, secret = await keys.create("a")
        assert await cache.authenticate(secret)
        keeping = asyncio.create_task(cache.keep_fresh())
        await keys.revoke(key.id)
        for _ in range(200):
            await asyncio.sleep(0.02)
            if not cache._keys:
                break
        async with counted(database) as statements:
            assert await cache.authenticate(secret) is None
        assert [s for s in statements if "auth_state" in s] == []
        keeping.cancel()
        await database.close()

    asyncio.run(run())


def test_broken_database_refuses_known_keys_and_recovers_without_restart(sqlite_url):
    async def run():
        async with opened(sqlite_url) as parts:
            _, secret = await parts.keys.create("a")
            assert await parts.cache.authenticate(secret)
            admin = sqlite3.connect(sqlite_url.removeprefix("sqlite+aiosqlite:///"), isolation_level=None)
            admin.execute("ALTER TABLE auth_state RENAME TO gone")
            parts.clock.now_s = 2.0
            for call in (parts.cache.authenticate(secret), parts.cache.tenant("default")):
                with pytest.raises(KeyStoreUnavailable, match=r"^key database: no such table: auth_state$"):
                    await call
            admin.execute("ALTER TABLE gone RENAME TO auth_state")
            admin.close()
            with pytest.raises(KeyStoreUnavailable):
                await parts.cache.authenticate(secret)
            parts.clock.now_s += RETRY_S
            assert await parts.cache.authenticate(secret)

    asyncio.run(run())


def test_postgres_that_stops_and_starts_again(postgres):
    """Cached keys are refused while it is down, and good again after it is back."""
    url = postgres.url("restart")

    async def run():
        async with opened(url) as parts:
            _, secret = await parts.keys.create("a")
            assert await parts.cache.authenticate(secret)
            await asyncio.to_thread(postgres.stop)
            parts.clock.now_s = 2.0
            refused = await asyncio.gather(
                *[parts.cache.authenticate(secret) for _ in range(50)], return_exceptions=True
            )
            assert {type(error) for error in refused} == {KeyStoreUnavailable}
            assert all("127.0.0.1" not in str(error) or "test@" not in str(error) for error in refused)
            await asyncio.to_thread(postgres.start)
            parts.clock.now_s = 10.0
            assert (await parts.cache.authenticate(secret)).key_name == "a"

    asyncio.run(run())


def test_salts_are_equal_in_all_processes_and_differ_between_groups(url):
    async def run():
        async with opened(url) as parts, opened(url) as other:
            await parts.tenants.create("a", cache_group="g")
            await parts.tenants.create("b", cache_group="g")
            await parts.tenants.create("g")
            await parts.tenants.create("c")
            salts = {name: (await parts.cache.tenant(name)).cache_salt for name in "abcg"}
            assert {name: (await other.cache.tenant(name)).cache_salt for name in "abcg"} == salts
            assert salts["a"] == salts["b"]
            assert len(set(salts.values())) == 3
            assert all(re.fullmatch(r"[0-9a-f]{64}", salt) for salt in salts.values())
            return salts

    first = asyncio.run(run())
    assert first


def test_salts_cannot_be_told_from_the_names(tmp_path):
    """Two installations have different salts for the same tenant."""

    async def salt(url):
        async with opened(url) as parts:
            return (await parts.cache.tenant("default")).cache_salt

    urls = [f"sqlite+aiosqlite:///{tmp_path}/{name}.db" for name in "ab"]
    assert len({asyncio.run(salt(url)) for url in urls}) == 2


def test_databases_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("not a database, and long enough to be read as one" * 100)
    cases = {
        f"sqlite+aiosqlite:///{tmp_path}/file": "file is not a database",
        f"sqlite+aiosqlite:///{tmp_path}/file/x.db": "File exists|Not a directory",
        f"sqlite+aiosqlite:///{tmp_path}": "Is a directory",
        "sqlite+nothing:///x.db": "sqlite.nothing",
        "mysql+asyncmy://u:hunter2@h/d": "asyncmy",
        "postgresql+asyncpg://u:hunter2@127.0.0.1:1/d": "Connect call failed|refused",
    }

    async def run(url, reason):
        with pytest.raises(KeyStoreUnavailable, match=reason) as caught:
            await opened(url).__aenter__()
        assert len(str(caught.value).splitlines()) == 1
        assert "hunter2" not in str(caught.value)
        with pytest.raises(KeyStoreUnavailable, match="not open"):
            await KeyStore(Database(url)).list()

    for url, reason in cases.items():
        asyncio.run(run(url, reason))


class LifeOfKeys(RuleBasedStateMachine):
    """Any order of changes: the cache, once refreshed, says what the model says."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.parts = self.runner.run(self._open())
        self.good = {}
        """Secret -> key id."""
        self.bad = set()
        self.disabled = set()

    async def _open(self):
        self.context = opened("sqlite+aiosqlite://")
        parts = await self.context.__aenter__()
        await parts.tenants.create("acme")
        return parts

    def teardown(self):
        self.runner.run(self.context.__aexit__(None, None, None))
        self.runner.close()

    def _end(self, key_id):
        for secret in [s for s, (k, _) in self.good.items() if k == key_id]:
            del self.good[secret]
            self.bad.add(secret)

    async def _refused(self, secret):
        try:
            return await self.parts.cache.authenticate(secret) is None
        except TenantDisabled:
            return bool(self.disabled)

    def _pick(self, index):
        live = sorted({key_id for key_id, _ in self.good.values()})
        return live[index % len(live)] if live else None

    @rule(tenant=st.sampled_from(["default", "acme"]))
    def create(self, tenant):
        key, secret = self.runner.run(self.parts.keys.create("k", tenant))
        self.good[secret] = (key.id, tenant)

    @rule(index=st.integers(0, 9))
    def revoke(self, index):
        if (key_id := self._pick(index)) is not None:
            self.runner.run(self.parts.keys.revoke(key_id))
            self._end(key_id)

    @rule(index=st.integers(0, 9), overlap=st.booleans())
    def rotate(self, index, overlap):
        if (key_id := self._pick(index)) is None:
            return
        before = [s for s, (k, _) in self.good.items() if k == key_id]
        newest = before[-1]
        tenant = self.good[newest][1]
        _, secret = self.runner.run(self.parts.keys.rotate(key_id, 3600 if overlap else 0))
        self._end(key_id)
        if overlap:
            self.bad.discard(newest)
            self.good[newest] = (key_id, tenant)
        self.good[secret] = (key_id, tenant)

    @rule(tenant=st.sampled_from(["default", "acme"]), on=st.booleans())
    def switch(self, tenant, on):
        store = self.parts.tenants
        self.runner.run(store.enable(tenant) if on else store.disable(tenant))
        (self.disabled.discard if on else self.disabled.add)(tenant)

    @invariant()
    def cache_says_the_same(self):
        self.parts.clock.now_s += 2.0
        self.parts.wall.now_s += 0.01
        for secret, (key_id, tenant) in self.good.items():
            if tenant in self.disabled:
                with pytest.raises(TenantDisabled):
                    self.runner.run(self.parts.cache.authenticate(secret))
            else:
                assert self.runner.run(self.parts.cache.authenticate(secret)).key_id == key_id
        for secret in self.bad:
            assert self.runner.run(self._refused(secret))


def test_life_of_keys():
    run_state_machine_as_test(
        LifeOfKeys,
        settings=settings(
            max_examples=8, stateful_step_count=20, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
