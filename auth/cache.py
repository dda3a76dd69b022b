"""Checks API keys: those in use are in memory, so that a check costs no database call."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import or_, select

from auth import records
from auth.database import Database
from auth.errors import KeyStoreUnavailable, TenantDisabled
from auth.keys import is_key
from auth.principal import Limits, Principal, ServiceClass
from auth.schema import api_keys, auth_state, tenants
from auth.store import KeyStore

log = structlog.get_logger()

RETRY_S = 1.0
"""After a failure the database is left alone this long, and requests are refused at once."""
TOUCH_S = 30.0
"""How often the last use of keys is written."""

_KEY_COLUMNS = [
    *(api_keys.c.id, api_keys.c.name, api_keys.c.tenant, api_keys.c.services, api_keys.c.scopes),
    *(api_keys.c.limits, api_keys.c.expires_at, api_keys.c.previous_hash, api_keys.c.previous_expires_at),
]


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """What requests need to know of a tenant."""

    name: str
    service_class: ServiceClass
    weight: float
    limits: Limits
    cache_group: str
    cache_salt: str
    disabled: bool

    def principal(self, key_id: str, key_name: str, **more: Any) -> Principal:
        """A caller of this tenant; `more` are further fields of Principal."""
        common = {
            "service_class": self.service_class,
            "weight": self.weight,
            "tenant_limits": self.limits,
            "cache_group": self.cache_group,
            "cache_salt": self.cache_salt,
        }
        return Principal(self.name, key_id, key_name, **(common | more))


class KeyCache:
    """Good keys in use, and their tenants; at most `max_keys` keys.

    Once in `refresh_s` seconds one small query tells what other processes changed, and that is dropped. When
    that fails, nothing is trusted: all methods raise KeyStoreUnavailable until the database is back.
    """

    def __init__(
        self,
        database: Database,
        *,
        refresh_s: float = 2.0,
        max_keys: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._refresh_s = refresh_s
        self._max_keys = max_keys
        self._clock = clock
        self._wall_clock = wall_clock
        self._keys: dict[bytes, tuple[Principal, float | None]] = {}
        """By the key's SHA-256: whose it is, and the Unix time of its end."""
        self._tenants: dict[str, TenantEntry] = {}
        self._disabled: frozenset[str] = frozenset()
        self._sets: dict[tuple[str, ...], frozenset[str]] = {}
        self._limits: dict[tuple[tuple[str, int | None], ...], Limits] = {}
        self._pending: dict[bytes, asyncio.Future[Principal | None]] = {}
        self._used: set[str] = set()
        self._secret = b""
        self._changes = -1
        self._fresh_until = float("-inf")
        self._failed_until = float("-inf")
        self._failure = ""
        self._lock = asyncio.Lock()

    async def authenticate(self, key: str) -> Principal | None:
        """Whose key this is; None for one that is unknown, revoked or expired. Raises TenantDisabled."""
        if not is_key(key):
            return None
        if self._clock() >= self._fresh_until:
            await self._refresh()
        digest = hashlib.sha256(key.encode()).digest()
        found = self._keys.get(digest)
        if found is None:
            principal = await self._shared_look_up(digest)
        else:
            principal, expires_s = found
            if expires_s is not None and expires_s <= self._wall_clock():
                del self._keys[digest]
                return None
        if principal is None:
            return None
        if principal.tenant in self._disabled:
            raise TenantDisabled
        self._used.add(principal.key_id)
        return principal

    async def holder(self, key_id: str) -> Principal | None:
        """The holder of a key by the key's id, None where it is revoked or expired. Raises TenantDisabled."""
        await self._refresh()
        good = select(api_keys.c.hash).where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
        async with self._database.reading() as connection:
            digest = (await connection.execute(good)).scalar_one_or_none()
        return None if digest is None else await self._shared_look_up(bytes.fromhex(digest))

    async def tenant(self, name: str) -> TenantEntry | None:
        """The tenant of this name, None if there is none. Raises TenantDisabled."""
        await self._refresh()
        entry = self._tenants.get(name) or await self._look_up_tenant(name)
        if entry is not None and entry.disabled:
            raise TenantDisabled
        return entry

    async def keep_fresh(self) -> None:
        """Refreshes ahead of need, so that no request waits for it, and writes keys' last use. Endless."""
        touch_at = self._clock() + TOUCH_S
        healthy = True
        while True:
            await asyncio.sleep(self._refresh_s / 2)
            try:
                await self._refresh(early=True)
                if self._clock() >= touch_at:
                    touch_at = self._clock() + TOUCH_S
                    await self.write_last_use()
            except KeyStoreUnavailable as error:
                if healthy:
                    log.error("key_database_unavailable", reason=str(error))
                healthy = False
            else:
                if not healthy:
                    log.info("key_database_back")
                healthy = True

    async def write_last_use(self) -> None:
        """Notes in the database which keys were used since the last call."""
        used, self._used = self._used, set()
        if used:
            await KeyStore(self._database).touch(used)

    # Looking up

    async def _shared_look_up(self, digest: bytes) -> Principal | None:
        """Requests with one key that come together share one look-up, not the whole pool of connections."""
        pending = self._pending.get(digest)
        if pending is None:
            pending = self._pending[digest] = asyncio.ensure_future(self._look_up(digest))
            pending.add_done_callback(lambda _: self._pending.pop(digest, None))
        return await asyncio.shield(pending)

    async def _look_up(self, digest: bytes) -> Principal | None:
        changes = self._changes
        text = digest.hex()
        either = or_(api_keys.c.hash == text, api_keys.c.previous_hash == text)
        query = select(*_KEY_COLUMNS).where(either, api_keys.c.revoked_at.is_(None))
        async with self._database.reading() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        tenant = self._tenants.get(row.tenant) or await self._look_up_tenant(row.tenant)
        ends = [row.expires_at, row.previous_expires_at if row.previous_hash == text else None]
        expires_s = min((records.epoch_s(end) for end in ends if end is not None), default=None)
        if tenant is None or (expires_s is not None and expires_s <= self._wall_clock()):
            return None
        principal = self._principal(row, tenant)
        # A refresh during the query may have seen a change that the query did not.
        if changes == self._changes:
            self._keep(digest, principal, expires_s)
        if tenant.disabled:
            raise TenantDisabled
        return principal

    def _keep(self, digest: bytes, principal: Principal, expires_s: float | None) -> None:
        self._keys[digest] = (principal, expires_s)
        if len(self._keys) > self._max_keys:
            del self._keys[next(iter(self._keys))]

    async def _look_up_tenant(self, name: str) -> TenantEntry | None:
        changes = self._changes
        async with self._database.reading() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            return None
        group = f"tenant:{row.name}" if row.cache_group is None else f"group:{row.cache_group}"
        entry = TenantEntry(
            name=row.name,
            service_class=row.service_class,
            weight=row.weight,
            limits=self._interned_limits(row.limits),
            cache_group=group,
            cache_salt=hmac.new(self._secret, group.encode(), hashlib.sha256).hexdigest(),
            disabled=row.disabled_at is not None,
        )
        if changes == self._changes:
            self._tenants[name] = entry
            self._disabled = frozenset(t.name for t in self._tenants.values() if t.disabled)
        return entry

    def _principal(self, row: Any, tenant: TenantEntry) -> Principal:
        return tenant.principal(
            row.id,
            row.name,
            scopes=self._interned_set(row.scopes),
            services=self._interned_set(row.services),
            key_limits=self._interned_limits(row.limits),
        )

    def _interned_set(self, items: list[str] | None) -> frozenset[str] | None:
        """One object for all keys with the same names: thousands of keys differ in few ways."""
        if items is None:
            return None
        return self._sets.setdefault(tuple(items), frozenset(items))

    def _interned_limits(self, values: dict[str, int | None]) -> Limits:
        known = tuple(sorted(values.items()))
        return self._limits.get(known) or self._limits.setdefault(known, Limits(**values))

    # Staying true

    async def _refresh(self, *, early: bool = False) -> None:
        """Drop what changed elsewhere; asks the database at most once per `refresh_s`, or now if `early`."""
        if not early and self._clock() < self._fresh_until:
            return
        async with self._lock:
            now = self._clock()
            if not early and now < self._fresh_until:
                return
            if now < self._failed_until:
                raise KeyStoreUnavailable(self._failure)
            try:
                await self._drop_changed()
            except KeyStoreUnavailable as error:
                self._failure, self._failed_until = str(error), self._clock() + RETRY_S
                raise
            self._fresh_until = now + self._refresh_s

    async def _drop_changed(self) -> None:
        async with self._database.reading() as connection:
            state = (await connection.execute(select(auth_state))).one()
            if self._changes in (state.changes, -1):  # nothing changed, or nothing was cached yet
                self._changes, self._secret = state.changes, bytes.fromhex(state.cache_secret)
                return
            keys = select(api_keys.c.id).where(api_keys.c.changed > self._changes)
            names = select(tenants.c.name).where(tenants.c.changed > self._changes)
            changed_keys = set((await connection.execute(keys)).scalars())
            changed_tenants = set((await connection.execute(names)).scalars())
        self._changes = state.changes
        for name in changed_tenants:
            self._tenants.pop(name, None)
        self._disabled = frozenset(t.name for t in self._tenants.values() if t.disabled)
        self._sets.clear()
        self._limits.clear()
        gone = [
            digest
            for digest, (principal, _) in self._keys.items()
            if principal.key_id in changed_keys or principal.tenant in changed_tenants
        ]
        for digest in gone:
            del self._keys[digest]
