"""Who calls: the credentials of a request, turned into a Principal."""

import asyncio
import contextlib
from collections.abc import Iterable

from auth.cache import KeyCache
from auth.database import Database
from auth.errors import BadCredentials, KeyStoreUnavailable
from auth.jwks import Jwks
from auth.jwt import TokenVerifier, looks_like_token
from auth.keys import parse_credentials
from auth.principal import Principal
from server.auth_sections import AuthSettings, JwtSettings


class Identity:
    """All that one worker needs to know its callers. `start` and `close` frame its life."""

    def __init__(self, auth: AuthSettings, jwt: JwtSettings) -> None:
        self._database = Database(auth.database_url)
        self._keys = KeyCache(self._database, refresh_s=auth.refresh_s, max_keys=auth.max_cached_keys)
        self._jwks = Jwks(jwt) if jwt.issuer is not None else None
        self._tokens = TokenVerifier(jwt, self._jwks, self._keys) if self._jwks is not None else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the database, which may be down just now, and begins the work beside requests."""
        await self._database.open()
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
        await self._database.close()

    async def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """The caller. Raises BadCredentials (401), Forbidden (403), IdentityUnavailable (503)."""
        credential = parse_credentials(headers)
        if self._tokens is not None and looks_like_token(credential):
            return await self._tokens.principal(credential)
        principal = await self._keys.authenticate(credential)
        if principal is None:
            raise BadCredentials("Incorrect API key provided.")
        return principal
