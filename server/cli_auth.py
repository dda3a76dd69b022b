"""`lapilli tenants`, `keys`, `services` and `db`: they need no running server."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

import click

from auth.database import Database
from auth.principal import DEFAULT_TENANT, SERVICE_CLASSES
from auth.records import ApiKey, Tenant, now
from auth.services import load_services, offer_of
from auth.store import DEFAULT_OVERLAP_S, KeyStore
from auth.tenants import TenantStore
from server.cli_audit import noted
from server.commands import SettingsCommand, json_flag, load, print_json, print_table

_FLAGS = ("config", "auth__database_url")
_UNSET = "none"
_Result = TypeVar("_Result")


class LimitOption(click.ParamType[Any]):
    """NAME=NUMBER or NAME=none."""

    name = "NAME=NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The pair; the store checks name and bounds."""
        name, _, number = str(value).partition("=")
        if number == _UNSET:
            return name, None
        try:
            return name, int(number)
        except ValueError:
            self.fail("write NAME=NUMBER, or NAME=none for no limit", param, ctx)


_limit = click.option(
    "--limit", "limits", type=LimitOption(), multiple=True,
    help="A limit, like tokens_per_min=50000 or requests_per_s=none; repeat it for more. Replaces all.",
)  # fmt: skip
_service = click.option(
    "--service", "services", multiple=True, help="A service the key may call, or `any`; repeat it for more."
)
_scope = click.option(
    "--scope", "scopes", multiple=True, help="An OAuth scope the key holds, or `any`; repeat it for more."
)
_expires = click.option("--expires", help="When the key ends: 2030-01-31, 2030-01-31T12:00:00Z, or `none`.")
_class = click.option("--class", "service_class", type=click.Choice(SERVICE_CLASSES))
_weight = click.option("--weight", type=float, help="Share against other tenants of the class.")
_group = click.option(
    "--cache-group", help="Tenants with the same group share the prefix cache; `none`: alone."
)


def _given(**values: Any) -> dict[str, Any]:
    """What the user gave of a key's or a tenant's values, as the stores take it."""
    found = {name: value for name, value in values.items() if value not in (None, ())}
    for name in ("services", "scopes"):
        if name in found:
            found[name] = None if found[name] == ("any",) else list(found[name])
    for name in ("expires_at", "cache_group"):
        if found.get(name) == _UNSET:
            found[name] = None
    if "limits" in found:
        found["limits"] = dict(found["limits"])
    return found


@click.group(no_args_is_help=True)
def keys() -> None:
    """Create, list, change, rotate and revoke API keys."""


@keys.command(cls=SettingsCommand, only=_FLAGS)
@click.option("--name", default="unnamed", show_default=True, help="What the key is for, for people.")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Whose key it is.")
@_service
@_scope
@_limit
@_expires
@json_flag
@click.pass_context
def create(
    ctx: click.Context, /, name: str, tenant: str, services: Any, scopes: Any, limits: Any,
    expires: str | None, as_json: bool, **_flags: str,
) -> None:  # fmt: skip
    """Create an API key and print it, this once."""
    values = _given(services=services, scopes=scopes, limits=limits, expires_at=expires)
    key, secret = _on_keys(ctx, lambda store: store.create(name, tenant, **values))
    _show_secret("Created", key, secret, as_json)


@keys.command("list", cls=SettingsCommand, only=_FLAGS)
@click.option("--tenant", help="Only this tenant's.")
@json_flag
@click.pass_context
def list_keys(ctx: click.Context, /, tenant: str | None, as_json: bool, **_flags: str) -> None:
    """List API keys, revoked ones too, without their secrets."""
    found = _on_keys(ctx, lambda store: store.list(tenant))
    if as_json:
        print_json([asdict(key) for key in found])
        return
    titles = ("id", "name", "tenant", "key", "services", "created (UTC)", "last used", "state")
    rows = [
        (k.id, k.name, k.tenant, k.prefix + "...", _listed(k.services), _minute(k.created_at),
         _minute(k.last_used_at), _state(k))
        for k in found
    ]  # fmt: skip
    print_table(titles, rows)


@keys.command("change", cls=SettingsCommand, only=_FLAGS)
@click.argument("key_id", metavar="ID")
@click.option("--name", help="What the key is for, for people.")
@_service
@_scope
@_limit
@_expires
@json_flag
@click.pass_context
def change_key(
    ctx: click.Context, /, key_id: str, name: str | None, services: Any, scopes: Any, limits: Any,
    expires: str | None, as_json: bool, **_flags: str,
) -> None:  # fmt: skip
    """Change the API key with this ID; what is not given stays."""
    values = _given(name=name, services=services, scopes=scopes, limits=limits, expires_at=expires)
    key = _on_keys(ctx, lambda store: store.change(key_id, **values))
    _show_key("Changed", key, as_json)


@keys.command(cls=SettingsCommand, only=_FLAGS)
@click.argument("key_id", metavar="ID")
@click.option(
    "--overlap-s", type=float, default=DEFAULT_OVERLAP_S, show_default=True,
    help="Seconds for which the old secret stays good.",
)  # fmt: skip
@json_flag
@click.pass_context
def rotate(ctx: click.Context, /, key_id: str, overlap_s: float, as_json: bool, **_flags: str) -> None:
    """Give the API key with this ID a new secret and print it, this once. Its ID and limits stay."""
    key, secret = _on_keys(ctx, lambda store: store.rotate(key_id, overlap_s))
    _show_secret("Rotated", key, secret, as_json)


@keys.command(cls=SettingsCommand, only=_FLAGS)
@click.argument("key_id", metavar="ID")
@json_flag
@click.pass_context
def revoke(ctx: click.Context, /, key_id: str, as_json: bool, **_flags: str) -> None:
    """Revoke the API key with this ID; running servers refuse it within auth.refresh_s seconds."""
    _show_key("Revoked", _on_keys(ctx, lambda store: store.revoke(key_id)), as_json)


@click.group(no_args_is_help=True)
def tenants() -> None:
    """Create, list and change tenants."""


@tenants.command("create", cls=SettingsCommand, only=_FLAGS)
@click.argument("name")
@_class
@_weight
@_limit
@_group
@json_flag
@click.pass_context
def create_tenant(
    ctx: click.Context, /, name: str, service_class: str | None, weight: float | None, limits: Any,
    cache_group: str | None, as_json: bool, **_flags: str,
) -> None:  # fmt: skip
    """Create a tenant."""
    values = _given(service_class=service_class, weight=weight, limits=limits, cache_group=cache_group)
    _show_tenant("Created", _on_tenants(ctx, lambda store: store.create(name, **values)), as_json)


@tenants.command("list", cls=SettingsCommand, only=_FLAGS)
@json_flag
@click.pass_context
def list_tenants(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """List all tenants."""
    found = _on_tenants(ctx, lambda store: store.list())
    if as_json:
        print_json([asdict(tenant) for tenant in found])
        return
    titles = ("name", "class", "weight", "limits", "cache group", "created (UTC)", "state")
    rows = [
        (t.name, t.service_class, f"{t.weight:g}", _limits(t.limits), t.cache_group or "",
         _minute(t.created_at), "disabled" if t.disabled_at else "")
        for t in found
    ]  # fmt: skip
    print_table(titles, rows)


@tenants.command("change", cls=SettingsCommand, only=_FLAGS)
@click.argument("name")
@_class
@_weight
@_limit
@_group
@json_flag
@click.pass_context
def change_tenant(
    ctx: click.Context, /, name: str, service_class: str | None, weight: float | None, limits: Any,
    cache_group: str | None, as_json: bool, **_flags: str,
) -> None:  # fmt: skip
    """Change a tenant; what is not given stays."""
    values = _given(service_class=service_class, weight=weight, limits=limits, cache_group=cache_group)
    _show_tenant("Changed", _on_tenants(ctx, lambda store: store.change(name, **values)), as_json)


@tenants.command(cls=SettingsCommand, only=_FLAGS)
@click.argument("name")
@json_flag
@click.pass_context
def disable(ctx: click.Context, /, name: str, as_json: bool, **_flags: str) -> None:
    """Refuse all requests of a tenant, within auth.refresh_s seconds."""
    _show_tenant("Disabled", _on_tenants(ctx, lambda store: store.disable(name)), as_json)


@tenants.command(cls=SettingsCommand, only=_FLAGS)
@click.argument("name")
@json_flag
@click.pass_context
def enable(ctx: click.Context, /, name: str, as_json: bool, **_flags: str) -> None:
    """Take requests of a disabled tenant again."""
    _show_tenant("Enabled", _on_tenants(ctx, lambda store: store.enable(name)), as_json)


@click.group(no_args_is_help=True)
def services() -> None:
    """The services that the file declares."""


@services.command("list", cls=SettingsCommand)
@json_flag
@click.pass_context
def list_services(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """Check the services file and list what it declares; a wrong one is an error of one line."""
    settings = load(ctx).settings
    found = load_services(settings.auth.services_file, offer_of(settings)).services
    if as_json:
        print_json([service.shown() for service in found])
        return
    titles = ("name", "endpoint", "model", "auth", "scopes", "limits")
    rows = [
        (s.name, s.endpoint, s.model or "any", ", ".join(s.auth), " ".join(sorted(s.scopes)),
         _limits(s.shown()["limits"]))
        for s in found
    ]  # fmt: skip
    print_table(titles, rows)


@click.group(no_args_is_help=True)
def db() -> None:
    """The database of tenants and keys."""


@db.command(cls=SettingsCommand, only=_FLAGS)
@json_flag
@click.pass_context
def upgrade(ctx: click.Context, /, as_json: bool, **_flags: str) -> None:
    """Bring the database's tables up to date; `lapilli serve` does it too unless auth.migrate is false."""
    before, after = _with_database(ctx, lambda database: database.upgrade(), upgrade=False)
    if as_json:
        print_json({"before": before, "after": after})
    else:
        click.echo(f"Revision {after}." if before == after else f"Revision {before or 'none'} -> {after}.")


def _on_keys(ctx: click.Context, action: Callable[[KeyStore], Coroutine[Any, Any, _Result]]) -> _Result:
    return _with_database(ctx, lambda database: action(KeyStore(database)))


def _on_tenants(ctx: click.Context, action: Callable[[TenantStore], Coroutine[Any, Any, _Result]]) -> _Result:
    return _with_database(ctx, lambda database: action(TenantStore(database)))


def _with_database(
    ctx: click.Context, action: Callable[[Database], Coroutine[Any, Any, _Result]], *, upgrade: bool = True
) -> _Result:
    loaded = load(ctx).settings
    settings = loaded.auth

    async def run() -> _Result:
        database = Database(settings.database_url)
        await database.open()
        try:
            if upgrade:
                await (database.upgrade() if settings.migrate else database.check())
            return await action(database)
        finally:
            await database.close()

    try:
        with noted(ctx, loaded.audit) as what:
            what.result = result = asyncio.run(run())
            return result
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _show_secret(done: str, key: ApiKey, secret: str, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(key), "key": secret})
    else:
        click.echo(f"{done} {key.id} ({key.name}). The key is shown only now:", err=True)
        click.echo(secret)


def _show_key(done: str, key: ApiKey, as_json: bool) -> None:
    if as_json:
        print_json(asdict(key))
    else:
        click.echo(f"{done} {key.id} ({key.name}).")


def _show_tenant(done: str, tenant: Tenant, as_json: bool) -> None:
    if as_json:
        print_json(asdict(tenant))
    else:
        click.echo(f"{done} tenant {tenant.name}.")


def _state(key: ApiKey) -> str:
    if key.revoked_at:
        return f"revoked {_minute(key.revoked_at)}"
    if key.expires_at and key.expires_at <= now():
        return f"expired {_minute(key.expires_at)}"
    return f"until {_minute(key.expires_at)}" if key.expires_at else ""


def _listed(names: list[str] | None) -> str:
    return "any" if names is None else ", ".join(names)


def _limits(limits: dict[str, int | None]) -> str:
    return ", ".join(f"{name}={_UNSET if value is None else value}" for name, value in limits.items())


def _minute(text: str | None) -> str:
    return text[:16].replace("T", " ") if text else ""
