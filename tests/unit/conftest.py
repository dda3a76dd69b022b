"""Databases for unit tests."""

import itertools
from collections.abc import Iterator

import pytest

from tests.postgres import Postgres, running_postgres

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server, started once."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def sqlite_url(tmp_path) -> str:
    """A database in a folder that does not exist yet."""
    return f"sqlite+aiosqlite:///{tmp_path}/state/lapilli/keys.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, sqlite_url) -> str:
    """An empty database, of each kind in turn."""
    if request.param == "sqlite":
        return sqlite_url
    return request.getfixturevalue("postgres").url(f"test_{next(_numbers)}")
