"""What people do with tenants. Running servers see a change within `auth.refresh_s`."""

import builtins
from collections.abc import Callable
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from auth import records
from auth.database import Database
from auth.records import Tenant, TenantExists, UnknownTenant
from auth.schema import tenants

SHOWN = [column for column in tenants.c if column.name != "changed"]
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "service_class": records.service_class,
    "weight": records.weight,
    "limits": records.limits,
    "cache_group": records.cache_group,
}
DEFAULTS: dict[str, Any] = {"service_class": "standard", "weight": 1.0, "limits": {}, "cache_group": None}


class TenantStore:
    """Tenants in the database. Bad values are ValueError; a failing database is KeyStoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, /, **values: Any) -> Tenant:
        """A new tenant: `service_class`, `weight`, `limits`, `cache_group`. Raises TenantExists."""
        row = {
            "name": records.slug(name, "a tenant's name"),
            **_checked(DEFAULTS | values),
            "created_at": records.now(),
            "disabled_at": None,
        }
        try:
            async with self._database.writing() as connection:
                await connection.execute(insert(tenants).values(row | {"changed": 0}))
        except IntegrityError:
            raise TenantExists from None
        return Tenant(**row)

    async def list(self) -> builtins.list[Tenant]:
        """All tenants, disabled ones too, by name."""
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(*SHOWN).order_by(tenants.c.name))).mappings().all()
        return [Tenant(**row) for row in rows]

    async def change(self, name: str, /, **values: Any) -> Tenant:
        """Set the given values; `limits` replaces all of them. Raises UnknownTenant."""
        return await self._update(name, _checked(values))

    async def disable(self, name: str) -> Tenant:
        """Refuse all its keys and tokens (403) until `enable`; again is no error. Raises UnknownTenant."""
        return await self._update(name, {"disabled_at": records.now()})

    async def enable(self, name: str) -> Tenant:
        """Undo `disable`. Raises UnknownTenant."""
        return await self._update(name, {"disabled_at": None})

    async def _update(self, name: str, values: dict[str, Any]) -> Tenant:
        this = tenants.c.name == name
        async with self._database.changing() as (connection, changed):
            await connection.execute(update(tenants).where(this).values(values | {"changed": changed}))
            row = (await connection.execute(select(*SHOWN).where(this))).mappings().one_or_none()
        if row is None:
            raise UnknownTenant
        return Tenant(**row)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name not in _CHECKS:
            raise ValueError(f"a tenant has no {name!r}; it has {', '.join(_CHECKS)}")
    return {name: _CHECKS[name](value) for name, value in values.items()}
