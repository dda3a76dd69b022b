"""The caller of a request, once known: who it is, what it may do, and how much."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

ServiceClass = Literal["interactive", "standard", "batch"]
SERVICE_CLASSES: tuple[str, ...] = get_args(ServiceClass)
DEFAULT_TENANT = "default"
"""The tenant that owns the first key, and each key made without naming a tenant."""

_MIB = 2**20
_ANY = (1, 2**53)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a key, a tenant or a service may use; None: no limit of this kind.

    Tokens are prompt and completion together. `tokens_per_day` and `tokens_per_month` are the budget.
    """

    requests_per_s: int | None = field(default=100, metadata={"bounds": (10, 5000)})
    requests_per_min: int | None = field(default=None, metadata={"bounds": _ANY})
    tokens_per_min: int | None = field(default=None, metadata={"bounds": _ANY})
    parallel_requests: int | None = field(default=None, metadata={"bounds": _ANY})
    tokens_per_day: int | None = field(default=None, metadata={"bounds": _ANY})
    tokens_per_month: int | None = field(default=None, metadata={"bounds": _ANY})
    max_body_bytes: int | None = field(default=None, metadata={"bounds": (_MIB, 64 * _MIB)})
    max_output_tokens: int | None = field(default=None, metadata={"bounds": _ANY})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Limits":
        """The limits that `values` sets, the others at their defaults. Raises ValueError, in one line."""
        known = {item.name: item.metadata["bounds"] for item in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"no limit is called {name!r}; known are {', '.join(known)}")
            least, most = known[name]
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ValueError(f"{name} must be an integer from {least} to {most}, or null for no limit")
        return cls(**values)

    def least(self, other: "Limits") -> "Limits":
        """Of each kind the smaller limit of the two."""
        pairs = {item.name: (getattr(self, item.name), getattr(other, item.name)) for item in fields(self)}
        return Limits(**{name: min(set(pair) - {None}, default=None) for name, pair in pairs.items()})

    def to_mapping(self) -> dict[str, int | None]:
        """The limits that differ from the defaults, as `from_mapping` takes them."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {
            name: cast("int | None", value) for name, (value, default) in values.items() if value != default
        }


DEFAULT_LIMITS = Limits()
"""One object for all keys that set nothing of their own."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. Everything here but `cache_salt` is safe to log; nothing changes during a request."""

    tenant: str
    key_id: str
    """Id of the API key, or one derived from a token's subject (`sub_...`)."""
    key_name: str
    service_class: str = "standard"
    weight: float = 1.0
    """The tenant's share against other tenants of its class."""
    scopes: frozenset[str] | None = None
    """OAuth scopes; None: all."""
    services: frozenset[str] | None = None
    """Names of the services it may call; None: all."""
    tenant_limits: Limits = DEFAULT_LIMITS
    key_limits: Limits = DEFAULT_LIMITS
    cache_group: str = ""
    """Equal groups share the prefix cache: `tenant:NAME`, or `group:NAME` where tenants share."""
    cache_salt: str = field(default="", repr=False)
    """What the engine mixes into the prefix cache for this group; never shown."""
