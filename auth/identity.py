"""Who calls: the credentials of a request, turned into a Principal."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from auth.cache import KeyCache
from auth.database import Database
from auth.errors import BadCredentials, Forbidden, KeyStoreUnavailable
from auth.jwks import Jwks
from auth.jwt import TokenVerifier, looks_like_token
from auth.keys import parse_credentials
from auth.principal import Limits, Principal
from auth.services import NO_LIMITS, Service
from server.auth_sections import AuthSettings, JwtSettings

_least = lru_cache(maxsize=4096)(Limits.least)


def _held_to(principal: Principal, limits: Limits) -> Principal:
    """The caller, held to a service's limits where they are below its own."""
    if limits == NO_LIMITS:
        return principal
    return replace(principal, key_limits=_least(principal.key_limits, limits))


class Identity:
    """All that one worker needs to know its callers. `start` and `close` frame its life."""

    def __init__(self, auth: AuthSettings, jwt: JwtSettings) -> None:
        self.database = Database(auth.database_url)
        self._keys = KeyCache(self.database, refresh_s=auth.refresh_s, max_keys=auth.max_cached_keys)
        self._jwks = Jwks(jwt) if jwt.issuer is not None else None
        self._tokens = TokenVerifier(jwt, self._jwks, self._keys) if self._jwks is not None else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the database, which may be down just now, and begins the work beside requests."""
        await self.database.open()
        self._tasks.append(asyncio.create_task(self._keys.keep_fresh()))
        if self._jwks is not None:
            self._tasks.append(asyncio.create_task(self._jwks.keep_fresh()))

    async def close(self) -> None:
        """Ends that work, notes the last use of keys and closes the database."""
        for task in self._tasks:
            task.cancel()
        if self._jwks is not None:
            await self._jwks.close()
        with contextlib.suppress(KeyStoreUnavailable):
            await self._keys.write_last_use()
        await self.database.close()

    async def identify(self, headers: Iterable[tuple[bytes, bytes]], service: Service) -> Principal:
        """The caller of a service, who may call it.

        Raises BadCredentials (401), Forbidden (403), IdentityUnavailable (503).
        """
        if service.auth == ("none",):
            return _held_to(await self._anonymous(service), service.limits)
        credential = parse_credentials(headers)
        if looks_like_token(credential) and self._tokens is not None:
            if "jwt" not in service.auth:
                raise BadCredentials("This service takes API keys, no tokens.")
            principal = await self._tokens.principal(credential)
        else:
            if "apikey" not in service.auth:
                raise BadCredentials("This service takes tokens, no API keys.")
            principal = await self._holder(credential)
        _check_service(principal, service)
        return _held_to(principal, service.limits)

    async def owner(self, tenant: str, key_id: str, service: Service) -> Principal:
        """The caller that left work behind, as far as it may still call the service.

        Raises BadCredentials (its key is gone), Forbidden, IdentityUnavailable.
        """
        principal = await self._keys.holder(key_id) if key_id.startswith("key_") else None
        if principal is None:
            entry = await self._keys.tenant(tenant)
            if key_id.startswith("key_") or entry is None:
                raise BadCredentials("The API key is revoked or expired, or its tenant is gone.")
            principal = entry.principal(key_id, key_id)
        _check_service(principal, service)
        return _held_to(principal, service.limits)

    async def _holder(self, key: str) -> Principal:
        principal = await self._keys.authenticate(key)
        if principal is None:
            raise BadCredentials("Incorrect API key provided.")
        return principal

    async def _anonymous(self, service: Service) -> Principal:
        """Whoever calls a service without credentials; the service's tenant answers for all of them."""
        tenant = await self._keys.tenant(service.tenant)
        if tenant is None:
            raise Forbidden("The tenant of this service does not exist.", "unknown_tenant")
        return tenant.principal(f"anonymous:{service.name}", "anonymous")


def _check_service(principal: Principal, service: Service) -> None:
    """Raises Forbidden for who may not call the service."""
    if principal.services is not None and service.name not in principal.services:
        raise Forbidden("This key may not call this service.", "service_not_allowed")
    if principal.scopes is not None and not service.scopes <= principal.scopes:
        raise Forbidden(
            "The scopes granted are not enough for this service.",
            "insufficient_scope",
            scopes=service.scopes,
        )
