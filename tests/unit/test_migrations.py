"""The database's tables: made from nothing, from an older version's, and refused from a newer one's."""

import asyncio

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from auth.cache import KeyCache
from auth.database import REVISION, Database
from auth.errors import KeyStoreUnavailable
from auth.keys import hash_key, new_key
from auth.schema import metadata
from auth.store import KeyStore

OLD_TABLE = """
CREATE TABLE api_keys (
    id VARCHAR(32) NOT NULL, name VARCHAR(100) NOT NULL, prefix VARCHAR(32) NOT NULL,
    hash VARCHAR(64) NOT NULL, created_at VARCHAR(32) NOT NULL, revoked_at VARCHAR(32),
    PRIMARY KEY (id), UNIQUE (hash)
)
"""
"""What Lapilli made before it had migrations."""


def run(url, work):
    async def opened():
        database = Database(url)
        await database.open()
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(opened())


async def differences(database):
    """Between the tables in the database and those in auth/schema.py."""

    def compare(connection):
        return compare_metadata(MigrationContext.configure(connection), metadata)

    async with database.reading() as connection:
        return await connection.run_sync(compare)


def test_from_nothing(url):
    async def work(database):
        with pytest.raises(KeyStoreUnavailable, match="older version; run `lapilli db upgrade`"):
            await database.check()
        assert await database.upgrade() == (None, REVISION)
        assert await database.upgrade() == (REVISION, REVISION)
        await database.check()
        assert await differences(database) == []

    run(url, work)


def test_from_the_version_before_migrations(url):
    """Every key stays, good or revoked, and belongs to the default tenant."""
    good, revoked = new_key(), new_key()

    async def work(database):
        async with database.writing() as connection:
            await connection.execute(text(OLD_TABLE))
            await connection.execute(text("CREATE INDEX api_keys_revoked_at ON api_keys (revoked_at)"))
            for key_id, secret, end in (
                ("key_a", good, None),
                ("key_b", revoked, "2026-01-02T00:00:00.000Z"),
            ):
                await connection.execute(
                    text("INSERT INTO api_keys VALUES (:id, :name, :prefix, :hash, :made, :end)"),
                    {"id": key_id, "name": "n", "prefix": secret[:12], "hash": hash_key(secret),
                     "made": "2026-01-01T00:00:00.000Z", "end": end},
                )  # fmt: skip
        assert await database.upgrade() == (None, REVISION)
        assert await differences(database) == []
        found = await KeyStore(database).list()
        assert [(key.id, key.tenant, key.services, key.limits) for key in found] == [
            ("key_a", "default", None, {}),
            ("key_b", "default", None, {}),
        ]
        assert found[1].revoked_at == "2026-01-02T00:00:00.000Z"
        cache = KeyCache(database)
        assert (await cache.authenticate(good)).key_id == "key_a"
        assert await cache.authenticate(revoked) is None
        await KeyStore(database).revoke("key_a")
        assert await KeyStore(database).ensure_first_key() is None

    run(url, work)


def test_from_a_newer_version(url):
    async def work(database):
        await database.upgrade()
        async with database.writing() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        for call in (database.upgrade(), database.check()):
            with pytest.raises(KeyStoreUnavailable, match="of a newer version of Lapilli"):
                await call

    run(url, work)


def test_a_migration_that_fails_leaves_nothing(sqlite_url):
    """All of it is one transaction."""

    async def work(database):
        async with database.writing() as connection:
            await connection.execute(text("CREATE TABLE auth_state (x INTEGER)"))
        with pytest.raises(KeyStoreUnavailable, match="auth_state already exists"):
            await database.upgrade()
        async with database.reading() as connection:
            tables = await connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
            assert set(tables.scalars()) == {"auth_state"}

    run(sqlite_url, work)
