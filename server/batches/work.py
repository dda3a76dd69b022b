"""One worker's turn with one batch: its input checked, its lines worked on, its files written."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import structlog

from auth import records
from auth.errors import BadCredentials, Forbidden, IdentityUnavailable
from auth.principal import Principal
from auth.services import Service
from server.batches.calls import call
from server.batches.leases import LeaseLost, Leases, Result
from server.batches.lines import (
    ENVELOPE_BYTES,
    Checker,
    Fault,
    LineTooLong,
    answer_line,
    numbered_lines,
    read_line,
)
from server.batches.output import add_undone, write_files
from server.batches.store import Batch
from server.gateway import Gateway

log = structlog.get_logger()

TURN_S = 60.0
"""After this time a batch is let go if another one waits."""
KEEP_S = 0.25
"""How often results are written."""
POLL_S = 0.05
"""How often it is seen whether there is room for a line."""
MAX_TRIES = 3
"""Tries of a line that is answered with 503: it may be what ends the engine."""
CHECKED_AT_ONCE = 64
"""Lines of input that are checked before the event loop has its turn."""


@dataclass
class Halt:
    """How a worker's batches are asked to stop."""

    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Start no further line."""
    cut: bool = False
    """Leave the lines that run."""


class BatchTurn:
    """A turn. `run` returns when the batch has ended, or when somebody else is to go on with it."""

    def __init__(self, gateway: Gateway, leases: Leases, batch: Batch, halt: Halt) -> None:
        self._gateway = gateway
        self._leases = leases
        self._batch = batch
        self._halt = halt
        self._status: str = batch.status
        self._started = batch.total > 0
        """Whether the input has been found right, now or in an earlier turn."""
        self._results: list[Result] = []
        self._flushing = asyncio.Lock()
        self._lines: set[asyncio.Task[None]] = set()
        self._owner: tuple[Principal, Service] | None = None
        self._fault: Fault | None = None
        """Why the batch can't go on: its owner may not."""
        self._error: BaseException | None = None
        """What broke a line: the turn ends, and another one goes on."""
        self._lost = False
        self._over = False

    async def run(self) -> None:
        """The turn. Raises LeaseLost, IdentityUnavailable."""
        log.info("batch_taken", batch=self._batch.id, tenant=self._batch.tenant, status=self._status)
        await self._check_owner()
        keeper = asyncio.create_task(self._keep())
        try:
            await self._go_on()
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _go_on(self) -> None:
        if self._status == "validating" and not self._must_stop():
            await self._validate()
        if self._status == "in_progress" and not self._must_stop():
            await self._work()
        if self._lost:
            raise LeaseLost
        await self._flush()
        if self._error is not None:
            raise self._error
        ending = self._ending()
        if self._status == "failed":
            pass  # its input was wrong
        elif ending is not None or self._status == "finalizing":
            await self._finish(ending or "completed")
        else:
            await self._leases.release(self._batch.id)
            log.info("batch_released", batch=self._batch.id)

    async def _finish(self, status: str) -> None:
        faults = [self._fault] if self._fault is not None and status == "failed" else []
        if status != "completed" and self._started:
            await add_undone(self._leases, self._batch, self._input(), status)
        await write_files(self._leases, self._gateway.files, self._batch, status, faults)
        log.info("batch_ended", batch=self._batch.id, status=status)

    # Whether it goes on

    def _ending(self) -> str | None:
        """The status that the batch ends with before its lines are done; None while it goes on."""
        if self._status in ("finalizing", "failed"):
            return None
        if self._status == "cancelling":
            return "cancelled"
        if self._fault is not None:
            return "failed"
        return "expired" if records.now() >= self._batch.expires_at else None

    def _must_stop(self) -> bool:
        """Whether no further line may be started."""
        halted = self._halt.stopping.is_set() or self._gateway.draining
        return halted or self._over or self._must_cut()

    def _must_cut(self) -> bool:
        """Whether running lines are not waited for."""
        ending = self._ending() is not None
        return self._halt.cut or self._lost or self._error is not None or ending

    def _room(self) -> bool:
        """Whether clients leave room for one more line."""
        gateway, settings = self._gateway, self._gateway.settings
        if not gateway.engine.ready or len(self._lines) >= settings.batch.max_parallel_lines:
            return False
        sequences = gateway.engine.max_num_seqs / settings.gateway.workers * settings.batch.max_engine_share
        return len(self._lines) + gateway.metrics.in_flight < max(1.0, sequences)

    async def _check_owner(self) -> None:
        """Notes a fault where the key or the tenant may no longer do this. Raises IdentityUnavailable."""
        batch, table = self._batch, self._gateway.services.table
        service = next((found for found in table.services if found.name == batch.service), None)
        if service is None:
            self._fault = Fault("service_not_found", "The service of this batch is gone.")
            return
        try:
            owner = await self._gateway.identity.owner(batch.tenant, batch.key_id, service)
        except BadCredentials as error:
            self._fault = Fault("invalid_api_key", str(error))
        except Forbidden as error:
            self._fault = Fault(error.code, str(error))
        else:
            self._owner = (owner, service)

    # Its input

    def _input(self) -> AsyncIterator[tuple[int, bytes]]:
        max_bytes = self._gateway.settings.gateway.max_body_bytes + ENVELOPE_BYTES
        return numbered_lines(self._gateway.files.chunks(self._batch.input_file), max_bytes)

    async def _validate(self) -> None:
        checker = Checker(self._batch.endpoint, self._gateway.settings.batch.max_requests)
        try:
            async for number, text in self._input():
                checker.add(number, text)
                if checker.full:
                    break
                if checker.total % CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                    if self._must_stop():
                        return
        except LineTooLong as error:
            checker.faults.append(Fault("line_too_long", "This line is too long.", error.number))
        if not checker.total and not checker.faults:
            checker.faults.append(Fault("empty_file", "The file has no requests."))
        if checker.faults:
            await self._leases.finish(self._batch.id, "failed", faults=checker.faults)
            self._status = "failed"
            log.info("batch_ended", batch=self._batch.id, status="failed", faults=len(checker.faults))
            return
        self._status = await self._leases.begin(self._batch.id, checker.total)
        self._started = True

    # Its lines

    async def _work(self) -> None:
        """Starts the lines that have no result, and waits for them."""
        try:
            await self._start_lines()
            while self._lines and not self._must_cut():
                await asyncio.wait(self._lines, timeout=POLL_S)
        finally:
            left = list(self._lines)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if not left and not self._must_stop():
            await self._flush()
            self._status = await self._leases.finalize(self._batch.id)

    async def _start_lines(self) -> None:
        done = await self._leases.done(self._batch.id)
        async for number, text in self._input():
            if number in done:
                continue
            while not self._must_stop() and not self._room():
                await asyncio.sleep(POLL_S)
            if self._must_stop():
                return
            task = asyncio.create_task(self._line(number, text))
            self._lines.add(task)
            task.add_done_callback(self._line_ended)
            await asyncio.sleep(0)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        self._lines.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()

    async def _line(self, number: int, text: bytes) -> None:
        """One line, to its result; none where it has to be left."""
        batch, line, tries = self._batch, read_line(text, self._batch.endpoint), 0
        assert self._owner is not None
        while True:
            answer = await call(self._gateway, batch.endpoint, bytes(line.body), *self._owner)
            tries += answer.status == 503
            if answer.retry_after_s is None or tries == MAX_TRIES:
                break
            await self._pause(answer.retry_after_s)
            if self._must_stop():
                return
        content = answer_line(batch.id, number, line.custom_id, answer.status, answer.request_id, answer.body)
        self._results.append(Result(number, answer.status == 200, content))

    async def _pause(self, least_s: float) -> None:
        """Until `least_s` are over and the engine serves, or the turn ends."""
        end = time.monotonic() + least_s
        while not self._must_stop() and (time.monotonic() < end or not self._gateway.engine.ready):
            await asyncio.sleep(POLL_S)

    # What goes on beside

    async def _flush(self) -> None:
        """Writes the results there are; when it returns, those that others began to write are written too."""
        async with self._flushing:
            results, self._results = self._results, []
            if not results:
                return
            try:
                self._status = await self._leases.add(self._batch.id, results)
            except IdentityUnavailable:
                self._results = results + self._results
                raise

    async def _keep(self) -> None:
        """Writes results, renews the lease, and sees whether the batch may go on; ends with the lease."""
        began = kept_at = checked_at = time.monotonic()
        lease_s = self._gateway.settings.batch.lease_s
        while not self._lost:
            await asyncio.sleep(KEEP_S)
            now = time.monotonic()
            try:
                if self._results:
                    await self._flush()
                    kept_at = now
                if now - checked_at > lease_s / 3:
                    self._status = await self._leases.renew(self._batch.id)
                    kept_at = checked_at = now
                    await self._check_owner()
                    self._over = now - began > TURN_S and await self._leases.others_wait()
            except LeaseLost:
                self._lost = True
            except IdentityUnavailable as error:
                log.warning("batch_database_unavailable", batch=self._batch.id, reason=str(error))
                self._lost = now - kept_at > lease_s
