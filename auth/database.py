"""The database of tenants and keys, SQLite or PostgreSQL: connections, transactions, migrations."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from auth.errors import KeyStoreUnavailable
from auth.schema import auth_state

SQLITE_BUSY_MS = 10_000
POSTGRES_LIMIT_S = 5
"""For a connection, for a statement, and for a free place in the pool."""
REVISION = "0003"
"""The newest migration: what this version of the program works with."""
MIGRATION_LOCK = 0x1A91111
"""Key of PostgreSQL's advisory lock, so that processes that start together migrate one after another."""

_WRITE = "lapilli_write"


class Database:
    """One database. All methods raise KeyStoreUnavailable when it fails; IntegrityError passes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None

    async def open(self) -> None:
        """Make ready to connect (for SQLite make folder and file where missing); touches no server yet."""
        try:
            url = make_url(self._url)
            _prepare_sqlite_file(url)
            self._engine = create_async_engine(url, **_options(url))
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise KeyStoreUnavailable(f"key database: {error}".splitlines()[0]) from error
        if url.get_backend_name() == "sqlite":
            event.listen(self._engine.sync_engine, "connect", _configure_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)

    async def upgrade(self) -> tuple[str | None, str]:
        """Bring the tables up to date; returns the revision before and after."""
        async with self.writing() as connection:
            return await connection.run_sync(_migrate), REVISION

    async def check(self) -> None:
        """Raises KeyStoreUnavailable where the tables are of another version than this program."""
        async with self.reading() as connection:
            await connection.run_sync(_check_revision)

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that only reads."""
        async with self._transaction(write=False) as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that writes; in SQLite it waits for its turn at its start, not in its middle."""
        async with self._transaction(write=True) as connection:
            yield connection

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[tuple[AsyncConnection, int]]:
        """A transaction that changes what may be cached, with the number that goes into the rows' `changed`.

        The counter's row is locked first, so numbers become visible in their order.
        """
        count = update(auth_state).values(changes=auth_state.c.changes + 1).returning(auth_state.c.changes)
        async with self.writing() as connection:
            yield connection, int((await connection.execute(count)).scalar_one())

    @asynccontextmanager
    async def _transaction(self, *, write: bool) -> AsyncIterator[AsyncConnection]:
        if self._engine is None:
            raise KeyStoreUnavailable("key database: not open")
        try:
            async with self._engine.connect() as connection:
                await connection.execution_options(**{_WRITE: write})
                async with connection.begin():
                    yield connection
        except IntegrityError:
            raise
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            # The cause alone: SQLAlchemy's own text repeats the statement and its parameters.
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise KeyStoreUnavailable(f"key database: {_text(cause)}") from error


def _text(error: BaseException | None) -> str:
    """The first line of an error, or its name; asyncpg's are wrapped with their class in front."""
    lines = str(error).splitlines()
    return lines[0].rpartition(">: ")[2] if lines else type(error).__name__


def _options(url: URL) -> dict[str, Any]:
    if url.get_driver_name() != "asyncpg":
        return {}
    limits = {"timeout": POSTGRES_LIMIT_S, "command_timeout": POSTGRES_LIMIT_S}
    return {"pool_pre_ping": True, "pool_timeout": POSTGRES_LIMIT_S, "connect_args": limits}


def _migrate(connection: Connection) -> str | None:
    """Runs the missing migrations; returns the revision before. Workers never import Alembic."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
    before = _revision(connection)
    if before == REVISION:
        return before
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        command.upgrade(config, "head")
    except CommandError:
        raise _other_version(before) from None
    return before


def _check_revision(connection: Connection) -> None:
    revision = _revision(connection)
    if revision != REVISION:
        raise _other_version(revision)


def _revision(connection: Connection) -> str | None:
    """The last migration that the database has seen; None for none."""
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if revision is None else str(revision)


def _other_version(revision: str | None) -> KeyStoreUnavailable:
    if revision is not None and revision > REVISION:
        return KeyStoreUnavailable(f"key database: of a newer version of Lapilli (revision {revision})")
    return KeyStoreUnavailable("key database: its tables are of an older version; run `lapilli db upgrade`")


def _prepare_sqlite_file(url: URL) -> None:
    """Folder (0700) and file (0600) of an SQLite database; SQLite gives its WAL files the same mode."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return
    path = Path(str(url.database))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Writers wait for each other (busy_timeout), readers wait for nobody (WAL); transactions are ours."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get(_WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
