"""Services: named endpoints over the server's model and its LoRA adapters, declared in a YAML file."""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from auth import records
from auth.principal import DEFAULT_TENANT, Limits
from server.config import Settings
from server.config_sources import SettingsError, read_yaml

log = structlog.get_logger()

POLL_S = 2.0
"""How often the file is looked at."""
PLAIN = "default"
"""The service of the plain paths (`/v1/...`); it is there also where the file does not declare it."""

NO_LIMITS = Limits(requests_per_s=None)

AuthKind = Literal["apikey", "jwt", "none"]
_ENDPOINT = re.compile(r"/|(/[A-Za-z0-9][A-Za-z0-9._~-]*)+")
_TAKEN = frozenset(
    {"v1", "health", "livez", "readyz", "metrics", "tokenize", "detokenize", "docs", "openapi.json"}
)
_KINDS = f"{', '.join(get_args(AuthKind))}, or a list of the first two"


class Service(BaseModel):
    """One service as the file declares it."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str
    model: str | None = None
    """Name of the served model or of a LoRA adapter; None: all of them."""
    runtime: Literal["vllm"] = "vllm"
    endpoint: str = Field("", validate_default=True)
    """Path before `/v1/...`; by default `/services/NAME`."""
    auth: tuple[AuthKind, ...] = ("apikey",)
    tenant: str = DEFAULT_TENANT
    """Whose limits and prefix cache count for callers without credentials (`auth: none`)."""
    scopes: frozenset[str] = frozenset()
    """OAuth scopes a caller must hold, all of them."""
    limits: Limits = NO_LIMITS
    """What each caller is held to where its own limits are higher; nothing set is no limit."""

    @field_validator("name", "tenant", mode="before")
    @classmethod
    def _slug(cls, value: Any) -> str:
        return records.slug(value, "a name")

    @field_validator("endpoint")
    @classmethod
    def _path(cls, value: str, info: Any) -> str:
        name = info.data.get("name", "")
        value = value or ("/" if name == PLAIN else f"/services/{name}")
        if _ENDPOINT.fullmatch(value) is None or value.split("/")[1] in _TAKEN or ".." in value:
            raise ValueError("a path like /services/chat, apart from the server's own paths")
        if (value == "/") != (name == PLAIN):
            raise ValueError(f"the plain paths belong to the service {PLAIN!r}, and to it alone")
        return value

    @field_validator("auth", mode="before")
    @classmethod
    def _kinds(cls, value: Any) -> Any:
        kinds = (value,) if isinstance(value, str) else value
        if (
            not isinstance(kinds, list | tuple)
            or not kinds
            or not set(map(str, kinds)) <= set(get_args(AuthKind))
        ):
            raise ValueError(f"one of {_KINDS}")
        if "none" in kinds and len(kinds) > 1:
            raise ValueError("none goes with no other kind")
        return tuple(kinds)

    @field_validator("scopes", mode="before")
    @classmethod
    def _scopes(cls, value: Any) -> frozenset[str]:
        return frozenset(records.scopes(value) or ())

    @field_validator("limits", mode="before")
    @classmethod
    def _limits(cls, value: Any) -> Limits:
        if isinstance(value, Limits):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("names of limits with numbers")
        return Limits.from_mapping({"requests_per_s": None, **value})

    def shown(self) -> dict[str, Any]:
        """The service for people, as JSON."""
        limits = {name: value for name, value in asdict(self.limits).items() if value is not None}
        return {
            "name": self.name, "model": self.model, "runtime": self.runtime, "endpoint": self.endpoint,
            "auth": list(self.auth), "tenant": self.tenant, "scopes": sorted(self.scopes), "limits": limits,
        }  # fmt: skip


@dataclass(frozen=True)
class ServiceTable:
    """All services; the longest endpoint first."""

    services: tuple[Service, ...]

    def match(self, path: str) -> tuple[Service, str]:
        """The service that a request's path belongs to, and the path without its endpoint."""
        for service in self.services[:-1]:
            if path.startswith(service.endpoint + "/"):
                return service, path[len(service.endpoint) :]
        return self.services[-1], path

    @property
    def plain(self) -> Service:
        """The service of the plain paths."""
        return self.services[-1]


@dataclass(frozen=True)
class Offer:
    """What services may refer to: the served names, and whether tokens can be checked."""

    models: tuple[str, ...]
    tokens: bool


def offer_of(settings: Settings) -> Offer:
    """What these settings offer."""
    return Offer(settings.engine.public_names, settings.jwt.issuer is not None)


def table_of(services: list[Service], offer: Offer) -> ServiceTable:
    """A table of `services`, and of the plain one where it is not among them. Raises ValueError."""
    if all(service.name != PLAIN for service in services):
        kinds: tuple[AuthKind, ...] = ("apikey", "jwt") if offer.tokens else ("apikey",)
        services = [*services, Service(name=PLAIN, auth=kinds)]
    for what in ("name", "endpoint"):
        values = [getattr(service, what) for service in services]
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise ValueError(f"two services have the {what} {twice}")
    for service in services:
        if service.model is not None and service.model not in offer.models:
            raise ValueError(
                f"{service.name}: model is none of those served here ({', '.join(offer.models)})"
            )
        if "jwt" in service.auth and not offer.tokens:
            raise ValueError(f"{service.name}: auth: jwt needs the setting jwt.issuer")
    return ServiceTable(tuple(sorted(services, key=lambda service: -len(service.endpoint))))


def load_services(path: Path | None, offer: Offer) -> ServiceTable:
    """The services that the file declares; without a file the plain one alone. Raises SettingsError."""
    if path is None:
        return table_of([], offer)
    document = read_yaml(path, str(path))
    entries = document.get("services") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"services"}:
        raise SettingsError(f"{path}: must hold one key, services, with a list")
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(Service.model_validate(entry))
        except ValidationError as error:
            raise SettingsError(f"{path}: {_problem(number, entry, error)}") from None
    try:
        return table_of(found, offer)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def _problem(number: int, entry: Any, error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    name = entry.get("name") if isinstance(entry, dict) and isinstance(entry.get("name"), str) else None
    where = ".".join([f"services[{name or number}]", *(str(part) for part in first["loc"])])
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"


class Services:
    """The table in force. A changed file takes effect when it is right, else the former table stays."""

    def __init__(self, path: Path | None, offer: Offer, table: ServiceTable | None = None) -> None:
        """`table` spares the first reading, for a process that starts while the file is wrong."""
        self._path = path
        self._offer = offer
        self._seen = None if table is not None else _stamp(path)
        self.table = table or load_services(path, offer)

    async def follow(self) -> None:
        """Looks at the file every two seconds. Endless."""
        while self._path is not None:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Takes the file anew if it has changed since the last look."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            table = load_services(self._path, self._offer)
        except SettingsError as error:
            log.error("services_file_refused", reason=str(error))
            return
        if table != self.table:
            self.table = table
            log.info("services_changed", services=[service.name for service in table.services])


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """What changes with the file: a mounted ConfigMap is replaced by another file of the same name."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_ino, found.st_size)
