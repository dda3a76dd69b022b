"""The part of a gateway worker that works on batches, one at a time, while clients leave room."""

import asyncio
import contextlib
import secrets
import time

import structlog

from auth.errors import IdentityUnavailable
from server.batches.leases import LeaseLost, Leases, prune
from server.batches.work import BatchTurn, Halt
from server.gateway import Gateway

log = structlog.get_logger()

POLL_S = 1.0
"""How often an idle worker looks for a batch."""
RETRY_S = 5.0
"""After a failure of the database."""
PRUNE_S = 3600.0
LET_GO_S = 3.0
"""For the last results to be written when lines had to be cut."""


class BatchRunner:
    """Works on batches until `stop`."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self._gateway = gateway
        self._leases = Leases(
            gateway.identity.database,
            secrets.token_hex(8),
            settings.engine.public_model_name,
            settings.batch.lease_s,
        )
        self._halt = Halt()
        self._idle = asyncio.Event()
        self._idle.set()
        self._prune_at = time.monotonic()

    async def run(self) -> None:
        """Endless, until `stop`."""
        if self._gateway.settings.batch.max_parallel_lines == 0:
            return
        while not self._halt.stopping.is_set():
            pause_s = POLL_S
            self._idle.clear()
            try:
                pause_s = await self._step()
            except LeaseLost:
                log.warning("batch_lease_lost")
            except IdentityUnavailable as error:
                log.error("batch_database_unavailable", reason=str(error))
                pause_s = RETRY_S
            except Exception:
                log.exception("batch_failed_to_run")
                pause_s = RETRY_S
            finally:
                self._idle.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._halt.stopping.wait(), pause_s)

    async def stop(self, limit_s: float) -> None:
        """Starts no further line; waits `limit_s` seconds at most for those that run, and lets go."""
        self._halt.stopping.set()
        for wait_s in (limit_s, LET_GO_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), wait_s)
            self._halt.cut = True

    async def _step(self) -> float:
        """Works on one batch, if there is one; returns the seconds to wait after it."""
        gateway = self._gateway
        if time.monotonic() >= self._prune_at:
            self._prune_at = time.monotonic() + PRUNE_S
            await prune(gateway.identity.database, gateway.settings.batch.retention_days)
        if gateway.draining or not gateway.engine.ready or gateway.protocol is None:
            return POLL_S
        batch = await self._leases.claim()
        if batch is None:
            return POLL_S
        try:
            await BatchTurn(gateway, self._leases, batch, self._halt).run()
        except LeaseLost:
            raise
        except Exception:
            # Not to wait until the lease has run out.
            with contextlib.suppress(IdentityUnavailable):
                await self._leases.release(batch.id)
            raise
        return 0.0
