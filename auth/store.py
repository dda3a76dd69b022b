"""Where API keys are kept: a database of hashes, and a cache of the keys in use."""

import asyncio
import builtins
import hmac
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Index,
    MetaData,
    String,
    Table,
    event,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from auth.keys import PREFIX_CHARS, hash_key, is_key, new_key
from auth.principal import DEFAULT_TENANT, Principal

FIRST_KEY_ID = "key_first"
MAX_NAME_CHARS = 100
SQLITE_BUSY_MS = 10_000

_metadata = MetaData()
_api_keys = Table(
    "api_keys",
    _metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(MAX_NAME_CHARS), nullable=False),
    Column("prefix", String(32), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", String(32), nullable=False),
    Column("revoked_at", String(32)),
)
_revoked_index = Index("api_keys_revoked_at", _api_keys.c.revoked_at)
_shown_columns = [column for column in _api_keys.c if column.name != "hash"]


class KeyStoreUnavailable(Exception):
    """The database cannot be used now (503); the message is one line and holds no secret."""


class UnknownKey(Exception):
    """No API key has this id."""


@dataclass(frozen=True)
class ApiKey:
    """One key as it may be shown. Times are UTC, ISO 8601; `revoked_at` is None while the key is good."""

    id: str
    name: str
    prefix: str
    created_at: str
    revoked_at: str | None


class KeyStore:
    """API keys in a database, with the good ones in use cached in memory.

    A cached key costs no database call, but for one small query every `refresh_s` seconds, which sees what
    other processes created or revoked. An unknown key costs one indexed look-up and no memory. All methods
    raise KeyStoreUnavailable when the database fails; `authenticate` then does not trust old answers.
    """

    def __init__(
        self, database_url: str, *, refresh_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database_url = database_url
        self._refresh_s = refresh_s
        self._clock = clock
        self._engine: AsyncEngine | None = None
        self._cache: dict[str, Principal] = {}
        self._pending: dict[str, asyncio.Future[Principal | None]] = {}
        self._counts: tuple[int, int] | None = None
        self._fresh_until = float("-inf")
        self._refresh_lock = asyncio.Lock()

    async def open(self) -> None:
        """Connect, and create the table (and for SQLite the folder and file) where missing."""
        try:
            url = make_url(self._database_url)
            _prepare_sqlite_file(url)
            self._engine = create_async_engine(url)
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise KeyStoreUnavailable(f"key database: {error}".splitlines()[0]) from error
        if url.get_backend_name() == "sqlite":
            event.listen(self._engine.sync_engine, "connect", _configure_sqlite)
        try:
            async with self._transaction() as connection:
                await connection.execute(CreateTable(_api_keys, if_not_exists=True))
                await connection.execute(CreateIndex(_revoked_index, if_not_exists=True))
        except KeyStoreUnavailable:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    async def create(self, name: str) -> tuple[ApiKey, str]:
        """A new key and its secret, which is not kept. Raises ValueError for a bad name."""
        if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise ValueError(f"a key's name has 1 to {MAX_NAME_CHARS} printable characters")
        secret = new_key()
        row = _row("key_" + secrets.token_hex(6), name, secret)
        async with self._transaction() as connection:
            await connection.execute(insert(_api_keys).values(row))
        return _api_key(row), secret

    async def list(self) -> builtins.list[ApiKey]:
        """All keys, revoked ones too, oldest first."""
        query = select(*_shown_columns).order_by(_api_keys.c.created_at, _api_keys.c.id)
        async with self._transaction() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [_api_key(dict(row)) for row in rows]

    async def revoke(self, key_id: str) -> ApiKey:
        """Make the key useless, here at once and elsewhere within their `refresh_s`; again is no error.

        Raises UnknownKey.
        """
        change = update(_api_keys).where(_api_keys.c.id == key_id, _api_keys.c.revoked_at.is_(None))
        query = select(*_shown_columns).where(_api_keys.c.id == key_id)
        async with self._transaction() as connection:
            await connection.execute(change.values(revoked_at=_now()))
            row = (await connection.execute(query)).mappings().one_or_none()
        self._fresh_until = float("-inf")
        if row is None:
            raise UnknownKey(key_id)
        return _api_key(dict(row))

    async def ensure_first_key(self) -> str | None:
        """The secret of a new key named "first" if there was no key at all, also no revoked one; else None.

        Of several processes that ask at once one gets the key: the fixed id cannot be inserted twice.
        """
        secret = new_key()
        row = _row(FIRST_KEY_ID, "first", secret)
        values = select(*[literal(value) for value in row.values()]).where(~exists(select(_api_keys.c.id)))
        try:
            async with self._transaction() as connection:
                result = await connection.execute(insert(_api_keys).from_select(list(row), values))
        except IntegrityError:
            return None
        return secret if result.rowcount == 1 else None

    async def authenticate(self, key: str) -> Principal | None:
        """Whose key this is; None for one that is unknown or revoked."""
        if not is_key(key):
            return None
        digest = hash_key(key)
        await self._refresh()
        if (principal := self._cache.get(digest)) is not None:
            return principal
        # Requests with one key that come together share one look-up, not the whole pool of connections.
        pending = self._pending.get(digest)
        if pending is None:
            pending = self._pending[digest] = asyncio.ensure_future(self._look_up(digest))
            pending.add_done_callback(lambda _: self._pending.pop(digest, None))
        return await asyncio.shield(pending)

    async def _look_up(self, digest: str) -> Principal | None:
        query = select(_api_keys.c.id, _api_keys.c.name, _api_keys.c.hash)
        query = query.where(_api_keys.c.hash == digest, _api_keys.c.revoked_at.is_(None))
        counts = self._counts
        async with self._transaction() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None or not hmac.compare_digest(row.hash, digest):
            return None
        principal = Principal(tenant=DEFAULT_TENANT, key_id=row.id, key_name=row.name)
        # A refresh during the query may have seen a revocation that the query did not.
        if counts == self._counts:
            self._cache[digest] = principal
        return principal

    async def _refresh(self) -> None:
        """Empty the cache if keys were created or revoked; asks the database at most once per `refresh_s`.

        Rows are never deleted and a revocation is never undone, so two counts tell of every change.
        """
        if self._clock() < self._fresh_until:
            return
        async with self._refresh_lock:
            now = self._clock()
            if now < self._fresh_until:
                return
            query = select(func.count(), func.count(_api_keys.c.revoked_at)).select_from(_api_keys)
            async with self._transaction() as connection:
                total, revoked = (await connection.execute(query)).one()
            if (total, revoked) != self._counts:
                self._cache.clear()
                self._counts = (total, revoked)
            self._fresh_until = now + self._refresh_s

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        if self._engine is None:
            raise KeyStoreUnavailable("key database: not open")
        try:
            async with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except (SQLAlchemyError, OSError) as error:
            # The cause alone: SQLAlchemy's own text repeats the statement and its parameters.
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise KeyStoreUnavailable(f"key database: {cause}".splitlines()[0]) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _row(key_id: str, name: str, secret: str) -> dict[str, str | None]:
    return {
        "id": key_id,
        "name": name,
        "prefix": secret[:PREFIX_CHARS],
        "hash": hash_key(secret),
        "created_at": _now(),
        "revoked_at": None,
    }


def _api_key(row: dict[str, Any]) -> ApiKey:
    return ApiKey(**{column.name: row[column.name] for column in _shown_columns})


def _prepare_sqlite_file(url: URL) -> None:
    """Folder (0700) and file (0600) of an SQLite database; SQLite gives its WAL files the same mode."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return
    path = Path(str(url.database))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Writers wait for each other (busy_timeout), readers wait for nobody (WAL)."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()
