"""Who calls: the credentials of a request, turned into a Principal."""

import asyncio
import contextlib
from collections.abc import Iterable

from auth.cache import KeyCache
from auth.database import Database, KeyStoreUnavailable
from auth.keys import BadCredentials, parse_credentials
from auth.principal import Principal
from server.auth_sections import AuthSettings


class Identity:
    """All that one worker needs to know its callers. `start` and `close` frame its life."""

    def __init__(self, settings: AuthSettings) -> None:
        self._database = Database(settings.database_url)
        self._keys = KeyCache(self._database, refresh_s=settings.refresh_s, max_keys=settings.max_cached_keys)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the database, which may be down just now, and begins the work beside requests."""
        await self._database.open()
        self._tasks.append(asyncio.create_task(self._keys.keep_fresh()))

    async def close(self) -> None:
        """Ends that work, notes the last use of keys and closes the database."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(KeyStoreUnavailable):
            await self._keys.write_last_use()
        await self._database.close()

    async def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """The caller. Raises BadCredentials (401), TenantDisabled (403), KeyStoreUnavailable (503)."""
        principal = await self._keys.authenticate(parse_credentials(headers))
        if principal is None:
            raise BadCredentials("Incorrect API key provided.")
        return principal
