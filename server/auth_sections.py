"""The sections of the settings tree that say who may call, and how much."""

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

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
        2.0,
        gt=0,
        le=5,
        description="Seconds within which a running server sees keys created or revoked elsewhere.",
    )
    max_cached_keys: int = Field(
        100_000, ge=1, description="Most API keys a worker keeps in memory, at some 430 bytes each."
    )
    services_file: Path | None = Field(
        None, description="YAML file of services (configs/services.yaml is one); followed while serving."
    )
    migrate: bool = Field(
        True, description="Bring the database's tables up to date at start; else `lapilli db upgrade` must."
    )


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric ones alone: with `none` or HS256 a token could be made by anybody who knows the public key."""


def is_safe_url(value: str) -> bool:
    """Whether `value` is an https address, or an http one of this machine."""
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(host)
    try:
        return parts.scheme == "http" and (host == "localhost" or ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False


def _safe_url(value: str) -> str:
    if not is_safe_url(value):
        raise ValueError("not an https address (http is for this machine alone)")
    return value


def _algorithms(value: Any) -> Any:
    """Environment and flags carry a list as text, with commas or as JSON."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",")]


class JwtSettings(Section):
    """Bearer tokens (JWT) of an OpenID Connect issuer; off unless `issuer` is set. See docs/tokens.md."""

    issuer: Annotated[str, AfterValidator(_safe_url)] | None = Field(
        None, description="Issuer of accepted tokens, as in their `iss`; unset: API keys alone."
    )
    audience: str | None = Field(
        None, min_length=1, description="What a token's `aud` must hold; needed with `issuer`."
    )
    algorithms: Annotated[tuple[Algorithm, ...], BeforeValidator(_algorithms)] = Field(
        ("RS256", "ES256"), min_length=1, description="Signature algorithms accepted, with commas."
    )
    jwks_url: Annotated[str, AfterValidator(_safe_url)] | None = Field(
        None, description="Address of the issuer's signing keys; unset: as OpenID Connect Discovery says."
    )
    leeway_s: float = Field(
        30.0, ge=0, le=300, description="Seconds by which clocks may differ at a token's start and end."
    )
    tenant_claim: str = Field("tenant", min_length=1, description="Claim that names the tenant.")
    class_claim: str = Field(
        "class", min_length=1, description="Claim that names the class of service; absent: the tenant's."
    )
    scope_claim: str = Field("scope", min_length=1, description="Claim with the OAuth scopes.")
    default_tenant: str | None = Field(
        None, min_length=1, description="Tenant of tokens without the tenant claim; unset: they get 403."
    )
    jwks_refresh_s: float = Field(
        300.0, gt=0, description="Seconds between fetches of the signing keys; withdrawn ones end with it."
    )
    jwks_cooldown_s: float = Field(
        5.0, gt=0, description="Least seconds between fetches, however many unknown key ids arrive."
    )
    jwks_timeout_s: float = Field(5.0, gt=0, le=60, description="Seconds that one fetch may take.")


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
