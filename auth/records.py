"""Tenants and API keys as they are shown, and the checks of what people give for them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from auth.principal import SERVICE_CLASSES, Limits
from auth.schema import MAX_NAME_CHARS, MAX_SLUG_CHARS

MAX_LIST_ITEMS = 64
MAX_WEIGHT = 1000.0

_SLUG = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_SLUG_CHARS - 1}}}")
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,128}")  # RFC 6749, appendix A.4


class UnknownKey(Exception):
    """No API key has this id."""


class UnknownTenant(Exception):
    """No tenant has this name."""


class TenantExists(Exception):
    """The name is taken."""


class KeyIsDead(Exception):
    """The key is revoked or expired, so it cannot be rotated or changed."""


@dataclass(frozen=True)
class Tenant:
    """One tenant. `limits`: those that differ from the defaults. Times are UTC, ISO 8601."""

    name: str
    service_class: str
    weight: float
    limits: dict[str, int | None]
    cache_group: str | None
    """Tenants with the same group share the prefix cache; None: alone."""
    created_at: str
    disabled_at: str | None


@dataclass(frozen=True)
class ApiKey:
    """One key as it may be shown. Times are UTC, ISO 8601; `revoked_at` is None while the key is good."""

    id: str
    name: str
    tenant: str
    prefix: str
    services: list[str] | None
    """Services it may call; None: all."""
    scopes: list[str] | None
    limits: dict[str, int | None]
    created_at: str
    expires_at: str | None
    last_used_at: str | None
    """To about a minute."""
    revoked_at: str | None
    previous_expires_at: str | None
    """Until when the secret before the last rotation is good; None: there is none."""


def now() -> str:
    """This moment as the tables keep it."""
    return _text(datetime.now(UTC))


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch_s(text: str) -> float:
    """Unix time of a time that the tables keep."""
    return datetime.fromisoformat(text).timestamp()


def later(seconds: float) -> str:
    """The moment `seconds` from now, as the tables keep it."""
    return _text(datetime.fromtimestamp(datetime.now(UTC).timestamp() + seconds, UTC))


def slug(value: Any, what: str) -> str:
    """A name for machines, of a tenant, service or group. Raises ValueError."""
    if not isinstance(value, str) or _SLUG.fullmatch(value) is None:
        raise ValueError(
            f"{what} has 1 to {MAX_SLUG_CHARS} of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        )
    return value


def key_name(value: Any) -> str:
    """A key's name, for people. Raises ValueError."""
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > MAX_NAME_CHARS
        or not value.isprintable()
    ):
        raise ValueError(f"a key's name has 1 to {MAX_NAME_CHARS} printable characters")
    return value


def service_class(value: Any) -> str:
    """A class of service. Raises ValueError."""
    if value not in SERVICE_CLASSES:
        raise ValueError(f"the class is one of {', '.join(SERVICE_CLASSES)}")
    return str(value)


def weight(value: Any) -> float:
    """A share against others. Raises ValueError."""
    if type(value) not in (int, float) or not 0 < value <= MAX_WEIGHT:
        raise ValueError(f"the weight is a number above 0, at most {MAX_WEIGHT:g}")
    return float(value)


def cache_group(value: Any) -> str | None:
    """The group of tenants that share the prefix cache, or None. Raises ValueError."""
    return None if value is None else slug(value, "a cache group")


def limits(value: Any) -> dict[str, int | None]:
    """Limits as they are kept. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("limits are names with numbers")
    return Limits.from_mapping(value).to_mapping()


def services(value: Any) -> list[str] | None:
    """Names of services, sorted, or None for all. Raises ValueError."""
    if value is None:
        return None
    return sorted({slug(item, "a service's name") for item in _items(value, "services")})


def scopes(value: Any) -> list[str] | None:
    """OAuth scopes, sorted, or None for all. Raises ValueError."""
    if value is None:
        return None
    found = _items(value, "scopes")
    if not all(isinstance(item, str) and _SCOPE.fullmatch(item) for item in found):
        raise ValueError("a scope has 1 to 128 printable ASCII characters, no space, quote or backslash")
    return sorted(set(found))


def expiry(value: Any) -> str | None:
    """A time to come, ISO 8601, UTC where it names no zone, as the tables keep it. Raises ValueError."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
        text = _text(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    except (TypeError, ValueError, OverflowError):
        raise ValueError("the expiry is a date or time like 2030-01-31 or 2030-01-31T12:00:00Z") from None
    if text <= now():
        raise ValueError("the expiry is in the past")
    return text


def _items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ValueError(f"{what} are a list of names")
    found = list(value)
    if len(found) > MAX_LIST_ITEMS:
        raise ValueError(f"{what} are at most {MAX_LIST_ITEMS}")
    return found
