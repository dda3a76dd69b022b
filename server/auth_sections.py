"""The sections of the settings tree that say who may call, and how much."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from sqlalchemy.engine import make_url
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from server.sections import Section

STATE_DATABASE = "lapilli/lapilli.db"


def default_database_url(env: Mapping[str, str]) -> str:
    """SQLite file in the user's state folder, by the XDG rules (a relative XDG_STATE_HOME does not count)."""
    state = env.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path(env.get("HOME") or Path.home()) / ".local" / "state"
    return f"sqlite+aiosqlite:///{base / STATE_DATABASE}"


def _async_database_url(value: str) -> str:
    """Checks that SQLAlchemy can read the URL and that its driver is there; quotes nothing of the URL."""
    try:
        url = make_url(value)
    except (SQLAlchemyError, ValueError):
        raise ValueError("not an SQLAlchemy URL") from None
    try:
        dialect = url.get_dialect()
        if not dialect.is_async:
            raise ValueError("the driver is not async (for SQLite write sqlite+aiosqlite)")
        dialect.import_dbapi()
    except NoSuchModuleError:
        raise ValueError("SQLAlchemy knows no such database driver") from None
    except ImportError as error:
        raise ValueError(f"the driver is not installed ({error})") from None
    return value


class AuthSettings(Section):
    """API keys and where they are kept."""

    database_url: Annotated[str, AfterValidator(_async_database_url)] = Field(
        default_factory=lambda: default_database_url(os.environ),
        repr=False,
        description="SQLAlchemy URL with an async driver; a missing SQLite folder is made, mode 0700.",
    )
    refresh_s: float = Field(
        2.0,
        gt=0,
        le=5,
        description="Seconds within which a running server sees keys created or revoked elsewhere.",
    )
    max_cached_keys: int = Field(
        100_000, ge=1, description="Most API keys a worker keeps in memory, at some 600 bytes each."
    )
    migrate: bool = Field(
        True, description="Bring the database's tables up to date at start; else `lapilli db upgrade` must."
    )
