"""API keys: their form, the header parser, and the store over a real SQLite file."""

import asyncio
import re
import sqlite3
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import event

from auth.keys import BadCredentials, hash_key, is_key, new_key, parse_credentials
from auth.principal import Principal
from auth.store import KeyStore, KeyStoreUnavailable, UnknownKey

KEY = new_key()
OTHER = new_key()
GOOD = KEY.encode()


class Clock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def url(tmp_path):
    """A database in a folder that does not exist yet."""
    return f"sqlite+aiosqlite:///{tmp_path}/state/lapilli/keys.db"


@asynccontextmanager
async def opened(url, **options):
    store = KeyStore(url, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def counted(store):
    """Counts the statements that reach the database."""
    statements = []
    engine = store._engine.sync_engine

    def note(_connection, _cursor, statement, *_rest):
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


# --- form and header parser (case O16) ---


def test_key_form():
    assert re.fullmatch(r"lapilli_[A-Za-z0-9_-]{43}", KEY)
    assert is_key(KEY)
    assert not any(
        is_key(text) for text in ("", KEY[:-1], KEY + "a", KEY + "\n", "sk-" + "a" * 43, KEY[:-1] + "é")
    )
    assert KEY != OTHER


def test_hash_is_sha256_hex():
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


GOOD_HEADERS = {
    "Bearer": [(b"authorization", b"Bearer " + GOOD)],
    "bearer": [(b"authorization", b"bearer " + GOOD)],
    "BEARER": [(b"Authorization", b"BEARER " + GOOD)],
    "two spaces": [(b"authorization", b"Bearer  " + GOOD)],
    "trailing space": [(b"authorization", b"Bearer " + GOOD + b" ")],
    "X-API-Key": [(b"x-api-key", GOOD)],
    "both, the same": [(b"x-api-key", GOOD), (b"authorization", b"Bearer " + GOOD)],
    "among others": [(b"host", b"h"), (b"accept", b"*/*"), (b"authorization", b"Bearer " + GOOD)],
}


@pytest.mark.parametrize("headers", GOOD_HEADERS.values(), ids=GOOD_HEADERS)
def test_good_headers(headers):
    assert parse_credentials(headers) == KEY


BAD_HEADERS = {
    "none": [],
    "byte E9": [(b"authorization", b"Bearer \xe9")],
    "key and byte E9": [(b"authorization", b"Bearer " + GOOD + b"\xe9")],
    "smart quotes": [(b"authorization", "Bearer “key”".encode())],
    "scheme alone": [(b"authorization", b"Bearer")],
    "empty token": [(b"authorization", b"Bearer ")],
    "empty": [(b"authorization", b"")],
    "no scheme": [(b"authorization", GOOD)],
    "other scheme": [(b"authorization", b"Basic dTpw")],
    "joined": [(b"authorization", b"Bearer" + GOOD)],
    "tab": [(b"authorization", b"Bearer\t" + GOOD)],
    "two tokens": [(b"authorization", b"Bearer " + GOOD + b" " + GOOD)],
    "line feed": [(b"authorization", b"Bearer " + GOOD + b"\n")],
    "NUL": [(b"authorization", b"Bearer \x00" + GOOD)],
    "64 kB": [(b"authorization", b"Bearer " + b"a" * 65536)],
    "two Authorization": [(b"authorization", b"Bearer " + GOOD)] * 2,
    "two X-API-Key": [(b"x-api-key", GOOD)] * 2,
    "empty X-API-Key": [(b"x-api-key", b"")],
    "scheme in X-API-Key": [(b"x-api-key", b"Bearer " + GOOD)],
    "good X-API-Key, other Authorization": [
        (b"x-api-key", GOOD),
        (b"authorization", b"Bearer " + OTHER.encode()),
    ],
    "good Authorization, other X-API-Key": [
        (b"authorization", b"Bearer " + GOOD),
        (b"x-api-key", OTHER.encode()),
    ],
    "good X-API-Key, broken Authorization": [(b"x-api-key", GOOD), (b"authorization", b"Bearer")],
    "good Authorization, empty X-API-Key": [(b"authorization", b"Bearer " + GOOD), (b"x-api-key", b"")],
}


@pytest.mark.parametrize("headers", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers_are_refused_without_quoting_them(headers):
    with pytest.raises(BadCredentials) as caught:
        parse_credentials(headers)
    assert KEY not in str(caught.value)
    assert str(caught.value).isascii()


_names = st.sampled_from([b"authorization", b"Authorization", b"x-api-key", b"X-API-Key", b"host"])
_values = st.binary(max_size=80) | st.builds(
    b"".join, st.lists(st.sampled_from([b"Bearer", b" ", b"=", GOOD]))
)


@given(st.lists(st.tuples(_names, _values), max_size=4))
@example([(b"authorization", b"Bearer " + GOOD)])
def test_parser_gives_an_ascii_token_or_its_own_error(headers):
    try:
        token = parse_credentials(headers)
    except BadCredentials:
        return
    assert token
    assert token.isascii()
    assert any(token.encode() in value for _, value in headers)


# --- store ---


def test_create_list_authenticate_revoke(url):
    async def run():
        async with opened(url) as store:
            key, secret = await store.create("team a")
            assert is_key(secret)
            assert secret.startswith(key.prefix)
            assert len(key.prefix) == 12
            assert re.fullmatch(r"key_[0-9a-f]{12}", key.id)
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", key.created_at)
            assert await store.list() == [key]
            assert await store.authenticate(secret) == Principal("default", key.id, "team a")
            assert await store.authenticate(OTHER) is None
            revoked = await store.revoke(key.id)
            assert revoked.revoked_at >= key.created_at
            assert await store.authenticate(secret) is None
            assert await store.revoke(key.id) == revoked
            with pytest.raises(UnknownKey):
                await store.revoke("key_none")

    asyncio.run(run())


@pytest.mark.parametrize("name", ["", "  ", "a" * 101, "a\nb", "a\x1b[31m"])
def test_bad_names(url, name):
    async def run():
        async with opened(url) as store:
            with pytest.raises(ValueError, match="1 to 100 printable"):
                await store.create(name)

    asyncio.run(run())


def test_first_key_only_in_an_empty_table(url):
    async def run():
        async with opened(url) as store:
            secret = await store.ensure_first_key()
            assert (await store.authenticate(secret)).key_name == "first"
            assert await store.ensure_first_key() is None
            await store.revoke("key_first")
            assert await store.ensure_first_key() is None

    asyncio.run(run())


_OPEN_AND_MAKE_FIRST_KEY = """
import asyncio, sys
from auth.store import KeyStore

async def run():
    store = KeyStore(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    await store.open()
    print(await store.ensure_first_key())
    await store.close()

asyncio.run(run())
"""


def test_processes_that_race_make_one_first_key(url):
    """Four processes open a database that does not exist and all ask for the first key."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _OPEN_AND_MAKE_FIRST_KEY, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    secrets = [text for text in printed if text != "None"]
    assert len(secrets) == 1

    async def check():
        async with opened(url) as store:
            assert await store.authenticate(secrets[0]) == Principal("default", "key_first", "first")
            assert len(await store.list()) == 1

    asyncio.run(check())


def test_known_key_costs_no_database_call_until_refresh(url):
    async def run():
        clock = Clock()
        async with opened(url, refresh_s=2.0, clock=clock) as store:
            _, secret = await store.create("a")
            await store.authenticate(secret)
            async with counted(store) as statements:
                clock.now_s = 1.9
                for _ in range(100):
                    assert await store.authenticate(secret)
                assert statements == []
                clock.now_s = 2.0
                await asyncio.gather(*[store.authenticate(secret) for _ in range(100)])
                assert len(statements) == 1

    asyncio.run(run())


def test_changes_by_another_process_are_seen_within_refresh(url):
    async def run():
        clock = Clock()
        async with opened(url, refresh_s=2.0, clock=clock) as server, opened(url) as cli:
            kept, revoked = await cli.create("kept"), await cli.create("revoked")
            assert await server.authenticate(revoked[1])
            await cli.revoke(revoked[0].id)
            clock.now_s = 1.9
            assert await server.authenticate(revoked[1]), "still cached"
            clock.now_s = 2.0
            assert await server.authenticate(revoked[1]) is None
            assert await server.authenticate(kept[1])
            _, late = await cli.create("late")
            assert await server.authenticate(late), "a new key is known at once"

    asyncio.run(run())


def test_unknown_keys_leave_nothing_in_memory(url):
    async def run():
        async with opened(url) as store:
            for _ in range(50):
                assert await store.authenticate(new_key()) is None
            assert store._cache == {}
            async with counted(store) as statements:
                for text in ("", "sk-1", "é", "a" * 100_000):
                    assert await store.authenticate(text) is None
                assert statements == []

    asyncio.run(run())


def test_no_secret_on_disk_and_files_are_private(url, tmp_path):
    async def run():
        async with opened(url) as store:
            secrets = [await store.ensure_first_key(), (await store.create("b"))[1]]
            files = list((tmp_path / "state" / "lapilli").iterdir())
            content = b"".join(file.read_bytes() for file in files)
            return secrets, content, files, [file.stat().st_mode & 0o077 for file in files]

    secrets, content, files, open_bits = asyncio.run(run())
    assert {file.name for file in files} == {"keys.db", "keys.db-wal", "keys.db-shm"}
    assert open_bits == [0, 0, 0]
    assert (tmp_path / "state" / "lapilli").stat().st_mode & 0o077 == 0
    for secret in secrets:
        assert secret.encode() not in content
        assert secret[12:].encode() not in content
        assert hash_key(secret).encode() in content


def test_broken_database_refuses_known_keys_and_recovers_without_restart(url):
    async def run():
        clock = Clock()
        async with opened(url, refresh_s=2.0, clock=clock) as store:
            _, secret = await store.create("a")
            assert await store.authenticate(secret)
            admin = sqlite3.connect(url.removeprefix("sqlite+aiosqlite:///"), isolation_level=None)
            admin.execute("ALTER TABLE api_keys RENAME TO gone")
            clock.now_s = 2.0
            for call in (
                store.authenticate(secret),
                store.list(),
                store.create("b"),
                store.ensure_first_key(),
            ):
                with pytest.raises(KeyStoreUnavailable, match=r"^key database: no such table: api_keys$"):
                    await call
            admin.execute("ALTER TABLE gone RENAME TO api_keys")
            admin.close()
            assert await store.authenticate(secret)

    asyncio.run(run())


def test_databases_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("not a database, and long enough to be read as one" * 100)
    cases = {
        f"sqlite+aiosqlite:///{tmp_path}/file": "file is not a database",
        f"sqlite+aiosqlite:///{tmp_path}/file/x.db": "File exists|Not a directory",
        f"sqlite+aiosqlite:///{tmp_path}": "Is a directory",
        "sqlite+nothing:///x.db": "sqlite.nothing",
        "mysql+asyncmy://u:hunter2@h/d": "asyncmy",
    }

    async def run(url, reason):
        store = KeyStore(url)
        with pytest.raises(KeyStoreUnavailable, match=reason) as caught:
            await store.open()
        assert len(str(caught.value).splitlines()) == 1
        assert "hunter2" not in str(caught.value)
        with pytest.raises(KeyStoreUnavailable, match="not open"):
            await store.authenticate(KEY)

    for url, reason in cases.items():
        asyncio.run(run(url, reason))
