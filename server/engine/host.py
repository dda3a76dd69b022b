"""One life of the engine core, as the supervisor sees it: start, client slots, heartbeat, end."""

import asyncio
import contextlib
from typing import Any

import structlog

from server.config import Settings
from server.engine.core import EngineCore, EngineStartError
from server.engine.link import EngineLink
from server.tasks import Tasks

log = structlog.get_logger()

ABORT_DELAYS_S = (0.0, 1.0, 5.0)
"""A dead worker's requests may still be on their way to the core when the first abort comes by."""


class EngineHost:
    """Starts one engine core, and knows when it has ended or stalled. For a restart make a new one."""

    def __init__(self, settings: Settings, config: Any) -> None:
        self._stall_limit_s = settings.engine.stall_limit_s
        self._config = config
        # The core greets each slot once: a worker that replaces a dead one needs an unused one.
        self.num_slots = 1 + settings.gateway.workers + settings.engine.spare_client_slots
        self._core = EngineCore(settings, config)
        self._link: EngineLink | None = None
        self._addresses: list[dict[str, Any]] = []
        self._next_slot = 1  # slot 0 is the link's
        self._tasks = Tasks()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def core_pids(self) -> tuple[int, ...]:
        """Process ids of the engine core."""
        return tuple(self._core.pids)

    async def start(self) -> None:
        """Starts the core; raises EngineStartError."""
        self._addresses = await asyncio.to_thread(self._core.start, self.num_slots)
        loop = asyncio.get_running_loop()

        def died_in_thread(reason: str) -> None:
            # RuntimeError: the loop is closed, nobody waits for this news.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, reason)

        self._core.watch(died_in_thread)
        try:
            self._link = await asyncio.to_thread(EngineLink, self._config, self._addresses[0], self.num_slots)
        except (TimeoutError, RuntimeError, OSError) as error:
            await self.stop()
            raise EngineStartError(f"no connection to the engine core: {error}") from error
        self._link.listen()
        self._tasks.spawn(self._heartbeat(self._link))

    def take_slot(self) -> tuple[int, dict[str, Any]] | None:
        """The next unused client slot (number, addresses); None when all are spent."""
        if self._next_slot >= self.num_slots:
            return None
        self._next_slot += 1
        return self._next_slot - 1, self._addresses[self._next_slot - 1]

    async def ended(self) -> str:
        """Waits for the core's end or stall, and says why."""
        return await asyncio.shield(self._ended)

    def abort(self, request_ids: list[str]) -> None:
        """Ends a dead worker's requests in the core."""
        if self._link is not None and request_ids:
            self._tasks.spawn(self._abort(self._link, request_ids))

    async def _abort(self, link: EngineLink, request_ids: list[str]) -> None:
        for delay_s in ABORT_DELAYS_S:
            await asyncio.sleep(delay_s)
            await link.abort(request_ids)

    async def _heartbeat(self, link: EngineLink) -> None:
        while await link.ping(self._stall_limit_s):
            await asyncio.sleep(min(1.0, self._stall_limit_s / 4))
        self.restart(f"the engine core has not answered for {self._stall_limit_s:g} s")

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            log.error("engine_ended", reason=reason)
            self._ended.set_result(reason)

    def restart(self, reason: str) -> None:
        """Ends the core so that `ended` returns `reason`."""
        self._end(reason)
        self._core.kill()

    async def stop(self) -> None:
        """Ends the core and the link to it."""
        self._tasks.cancel()
        await asyncio.to_thread(self._core.stop)
        if self._link is not None:
            self._link.close()
