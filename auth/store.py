"""What people do with API keys. Running servers see it within `auth.refresh_s`; auth/cache.py checks keys."""

import builtins
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import bindparam, exists, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from auth import records
from auth.database import Database
from auth.keys import PREFIX_CHARS, hash_key, new_key
from auth.principal import DEFAULT_TENANT
from auth.records import ApiKey, KeyIsDead, UnknownKey, UnknownTenant
from auth.schema import api_keys, tenants

FIRST_KEY_ID = "key_first"
DEFAULT_OVERLAP_S = 24 * 3600.0
MAX_OVERLAP_S = 90 * 24 * 3600.0

_HIDDEN = {"hash", "previous_hash", "changed"}
SHOWN = [column for column in api_keys.c if column.name not in _HIDDEN]
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": records.key_name,
    "services": records.services,
    "scopes": records.scopes,
    "limits": records.limits,
    "expires_at": records.expiry,
}
DEFAULTS: dict[str, Any] = {"services": None, "scopes": None, "limits": {}, "expires_at": None}


class KeyStore:
    """API keys in the database: hashes, never secrets.

    Bad values are ValueError; a failing database is KeyStoreUnavailable.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, tenant: str = DEFAULT_TENANT, /, **values: Any) -> tuple[ApiKey, str]:
        """A new key and its secret, which is not kept: `services`, `scopes`, `limits`, `expires_at`.

        Raises UnknownTenant.
        """
        records.slug(tenant, "a tenant's name")
        secret = new_key()
        row = _row(
            "key_" + secrets.token_hex(6), tenant, secret, _checked(DEFAULTS | values | {"name": name})
        )
        owner = select(tenants.c.name).where(tenants.c.name == tenant)
        async with self._database.writing() as connection:
            if (await connection.execute(owner)).one_or_none() is None:
                raise UnknownTenant
            await connection.execute(insert(api_keys).values(row))
        return _api_key(row), secret

    async def list(self, tenant: str | None = None) -> builtins.list[ApiKey]:
        """All keys, or a tenant's, revoked ones too, oldest first."""
        query = select(*SHOWN).order_by(api_keys.c.created_at, api_keys.c.id)
        if tenant is not None:
            query = query.where(api_keys.c.tenant == tenant)
        async with self._database.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [_api_key(dict(row)) for row in rows]

    async def change(self, key_id: str, /, **values: Any) -> ApiKey:
        """Set the given values; `limits` replaces all of them. Raises UnknownKey, KeyIsDead."""
        return await self._update(key_id, _checked(values))

    async def rotate(self, key_id: str, overlap_s: float = DEFAULT_OVERLAP_S) -> tuple[ApiKey, str]:
        """A new secret for the key, whose id and limits stay; the old one is good `overlap_s` seconds more.

        A secret from before an earlier rotation ends at once. Raises UnknownKey, KeyIsDead.
        """
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise ValueError(f"the overlap is 0 to {MAX_OVERLAP_S:.0f} seconds")
        secret = new_key()
        values = {
            "hash": hash_key(secret),
            "prefix": secret[:PREFIX_CHARS],
            "previous_hash": api_keys.c.hash if overlap_s else None,
            "previous_expires_at": records.later(overlap_s) if overlap_s else None,
        }
        return await self._update(key_id, values), secret

    async def revoke(self, key_id: str) -> ApiKey:
        """Make the key useless, its old secrets too; again is no error. Raises UnknownKey."""
        this = api_keys.c.id == key_id
        async with self._database.changing() as (connection, changed):
            change = update(api_keys).where(this, api_keys.c.revoked_at.is_(None))
            await connection.execute(change.values(revoked_at=records.now(), changed=changed))
            row = (await connection.execute(select(*SHOWN).where(this))).mappings().one_or_none()
        if row is None:
            raise UnknownKey
        return _api_key(dict(row))

    async def ensure_first_key(self) -> str | None:
        """The secret of a new key named "first" if there was no key at all, also no revoked one; else None.

        Of several processes that ask at once one gets the key: the fixed id cannot be inserted twice.
        """
        secret = new_key()
        row = _row(FIRST_KEY_ID, DEFAULT_TENANT, secret, DEFAULTS | {"name": "first"})
        values = [literal(value, api_keys.c[name].type) for name, value in row.items()]
        source = select(*values).where(~exists(select(api_keys.c.id)))
        try:
            async with self._database.writing() as connection:
                result = await connection.execute(insert(api_keys).from_select(list(row), source))
        except IntegrityError:
            return None
        return secret if result.rowcount == 1 else None

    async def touch(self, key_ids: Iterable[str]) -> None:
        """Note that these keys were used just now. Not a change: no cache drops anything."""
        # Sorted, so that two workers lock rows in one order.
        values = [{"key_id": key_id} for key_id in sorted(key_ids)]
        change = update(api_keys).where(api_keys.c.id == bindparam("key_id"))
        async with self._database.writing() as connection:
            await connection.execute(change.values(last_used_at=records.now()), values)

    async def _update(self, key_id: str, values: dict[str, Any]) -> ApiKey:
        this = api_keys.c.id == key_id
        async with self._database.changing() as (connection, changed):
            query = select(api_keys.c.revoked_at, api_keys.c.expires_at).where(this)
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise UnknownKey
            if found.revoked_at or (found.expires_at and found.expires_at <= records.now()):
                raise KeyIsDead
            await connection.execute(update(api_keys).where(this).values(values | {"changed": changed}))
            row = (await connection.execute(select(*SHOWN).where(this))).mappings().one()
        return _api_key(dict(row))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name in values:
        if name not in _CHECKS:
            raise ValueError(f"a key has no {name!r}; it has {', '.join(_CHECKS)}")
    return {name: _CHECKS[name](value) for name, value in values.items()}


def _row(key_id: str, tenant: str, secret: str, values: dict[str, Any]) -> dict[str, Any]:
    unset = dict.fromkeys(("last_used_at", "revoked_at", "previous_hash", "previous_expires_at"))
    made = {
        "id": key_id,
        "tenant": tenant,
        "prefix": secret[:PREFIX_CHARS],
        "hash": hash_key(secret),
        "created_at": records.now(),
        "changed": 0,
    }
    return unset | values | made


def _api_key(row: dict[str, Any]) -> ApiKey:
    return ApiKey(**{column.name: row[column.name] for column in SHOWN})
