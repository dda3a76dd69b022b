"""The sections of the settings tree that say who may call, and how much."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from redis.connection import parse_url
from sqlalchemy.engine import make_url
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from server.sections import Section, json_value

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
        2.0, gt=0, description="Seconds within which a running server sees keys created or revoked elsewhere."
    )


LimitName = Literal[
    "requests_per_s",
    "requests_per_min",
    "tokens_per_min",
    "parallel_requests",
    "tokens_per_day",
    "tokens_per_month",
]


def _redis_url(value: str) -> str:
    """Checks that redis-py can read the URL; quotes nothing of it."""
    try:
        parse_url(value)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError("not a Redis URL (redis://, rediss:// or unix://)") from None
    return value


def _names(value: Any) -> Any:
    """A list, or text as in `a,b`; JSON text too, as the environment and flags carry lists."""
    if isinstance(value, str):
        value = json_value(value) if value.lstrip().startswith("[") else value.split(",")
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of limits")
    return tuple(str(name).strip() for name in value if str(name).strip())


class LimitsSettings(Section):
    """How much tenants may use, where that is counted, and what holds for tenants that set no limit."""

    store: Literal["memory", "redis", "none"] = Field(
        "memory",
        description="`memory`: for one worker; `redis`: for several workers or hosts; `none`: no limits.",
    )
    redis_url: Annotated[str, AfterValidator(_redis_url)] = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,
        description="Redis 6.2 or newer, for `store: redis`: redis://, rediss:// (TLS) or unix://.",
    )
    redis_timeout_s: float = Field(1.0, gt=0, le=60, description="Seconds Redis may take to answer.")
    fail_open: bool = Field(
        False, description="Admit requests while Redis can't be asked; off: they get 503 with Retry-After."
    )
    shadow: Annotated[tuple[LimitName, ...], BeforeValidator(_names)] = Field(
        (), description="Limits that only count what they would refuse; several joined by commas."
    )
    requests_per_s: int | None = Field(
        100, ge=10, le=5000, description="Requests per second, by default; null: no limit."
    )
    requests_per_min: int | None = Field(None, ge=1, description="Requests per minute, by default.")
    tokens_per_min: int | None = Field(
        None, ge=1, description="Tokens per minute, prompt and output, by default."
    )
    parallel_requests: int | None = Field(
        None, ge=1, description="Requests that may run at the same time, by default."
    )
    tokens_per_day: int | None = Field(None, ge=1, description="Tokens per UTC day, by default.")
    tokens_per_month: int | None = Field(None, ge=1, description="Tokens per UTC calendar month, by default.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Most output tokens of one choice that a request may ask for, by default."
    )
