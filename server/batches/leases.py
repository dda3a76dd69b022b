"""What a worker does with a batch in the database: it holds a lease, and all that it writes needs it."""

import builtins
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from auth import records
from auth.database import Database
from auth.schema import batch_results, batches, file_chunks, files
from server.batches.files import DAY_S, FileWriter
from server.batches.lines import Fault
from server.batches.store import Batch

PAGE_ROWS = 64
UNSEALED_S = DAY_S
"""A file that is not whole after this time has no writer any more."""


class LeaseLost(Exception):
    """Another worker has the batch now: nothing more may be written."""


class Result(NamedTuple):
    """A line of output for line `number` of the input; `ok` says to which file it goes."""

    number: int
    ok: bool
    content: bytes


class Leases:
    """The batches that one worker, called `runner`, works on. A failing database is KeyStoreUnavailable."""

    def __init__(self, database: Database, runner: str, model: str, lease_s: float) -> None:
        self._database = database
        self._runner = runner
        self._model = model
        self._lease_s = lease_s

    async def claim(self) -> Batch | None:
        """A batch that nobody works on, now leased; of the tenant that was served the longest ago."""
        query = self._free()
        async with self._database.reading() as connection:
            found = (await connection.execute(query)).scalar()
        if found is None:
            return None
        change = update(batches).where(batches.c.id == found, batches.c.ended_at.is_(None), _unleased())
        values = {"runner": self._runner, "lease_until": self._until(), "served_at": records.now()}
        async with self._database.writing() as connection:
            change = change.values(values).returning(*batches.c)
            return (await connection.execute(change)).one_or_none()

    async def others_wait(self) -> bool:
        """Whether there is a batch that nobody works on."""
        async with self._database.reading() as connection:
            return (await connection.execute(self._free())).scalar() is not None

    def _free(self) -> Any:
        others = batches.alias()
        last = select(func.max(others.c.served_at)).where(others.c.tenant == batches.c.tenant)
        return (
            select(batches.c.id)
            .where(batches.c.ended_at.is_(None), batches.c.model == self._model, _unleased())
            .order_by(
                func.coalesce(last.scalar_subquery(), ""),
                func.coalesce(batches.c.served_at, ""),
                batches.c.created_at,
            )
            .limit(1)
        )

    async def renew(self, batch_id: str) -> str:
        """Extends the lease; returns the batch's status. Raises LeaseLost."""
        async with self._database.writing() as connection:
            return await self._write(connection, batch_id, {})

    async def release(self, batch_id: str) -> None:
        """Lets go of it, for whoever comes next."""
        change = update(batches).where(batches.c.id == batch_id, batches.c.runner == self._runner)
        async with self._database.writing() as connection:
            await connection.execute(change.values(runner=None, lease_until=None, served_at=records.now()))

    async def begin(self, batch_id: str, total: int) -> str:
        """The input is right: from `validating` to `in_progress`; returns the status it has then."""
        change = update(batches).where(batches.c.id == batch_id, batches.c.status == "validating")
        async with self._database.writing() as connection:
            await self._write(connection, batch_id, {"total": total})
            await connection.execute(change.values(status="in_progress", in_progress_at=records.now()))
            return await self._write(connection, batch_id, {})

    async def finalize(self, batch_id: str) -> str:
        """From `in_progress` to `finalizing`; returns the status it has then. Raises LeaseLost."""
        change = update(batches).where(batches.c.id == batch_id, batches.c.status == "in_progress")
        async with self._database.writing() as connection:
            await self._write(connection, batch_id, {})
            await connection.execute(change.values(status="finalizing", finalizing_at=records.now()))
            return await self._write(connection, batch_id, {})

    async def add(self, batch_id: str, results: Sequence[Result], *, answered: bool = True) -> str:
        """Keeps results; `answered` ones are counted. Returns the batch's status. Raises LeaseLost."""
        completed = sum(result.ok for result in results) if answered else 0
        failed = len(results) - completed if answered else 0
        counts = {
            "completed": batches.c.completed + completed,
            "failed": batches.c.failed + failed,
        }
        async with self._database.writing() as connection:
            status = await self._write(connection, batch_id, counts)
            rows = [{"batch": batch_id, **result._asdict()} for result in results]
            await connection.execute(insert(batch_results), rows)
            return status

    async def done(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have results."""
        query = select(batch_results.c.number).where(batch_results.c.batch == batch_id)
        async with self._database.reading() as connection:
            return set((await connection.execute(query)).scalars())

    async def results(self, batch_id: str) -> AsyncIterator[Result]:
        """All results in the order of the input."""
        last = -1
        columns = (batch_results.c.number, batch_results.c.ok, batch_results.c.content)
        while True:
            query = (
                select(*columns)
                .where(batch_results.c.batch == batch_id, batch_results.c.number > last)
                .order_by(batch_results.c.number)
                .limit(PAGE_ROWS)
            )
            async with self._database.reading() as connection:
                page = (await connection.execute(query)).all()
            for row in page:
                yield Result(*row)
            if len(page) < PAGE_ROWS:
                return
            last = page[-1].number

    async def finish(
        self,
        batch_id: str,
        status: str,
        *,
        faults: Sequence[Fault] = (),
        output: FileWriter | None = None,
        errors: FileWriter | None = None,
    ) -> None:
        """The end: `status`, and the files where they hold anything. Raises LeaseLost."""
        now = records.now()
        values: dict[str, Any] = {"status": status, f"{status}_at": now, "ended_at": now}
        values |= {"errors": [fault.shown() for fault in faults] or None}
        written = {"output_file": output, "error_file": errors}
        whole = {name: writer for name, writer in written.items() if writer is not None and writer.size}
        values |= {name: writer.id for name, writer in whole.items()}
        async with self._database.writing() as connection:
            await self._write(connection, batch_id, values)
            for writer in whole.values():
                await connection.execute(writer.sealed())
            await connection.execute(delete(batch_results).where(batch_results.c.batch == batch_id))
            await connection.execute(
                update(batches).where(batches.c.id == batch_id).values(runner=None, lease_until=None)
            )

    async def _write(self, connection: AsyncConnection, batch_id: str, values: dict[str, Any]) -> str:
        """Changes the batch's row if it is still ours, and extends the lease; returns its status."""
        change = update(batches).where(batches.c.id == batch_id, batches.c.runner == self._runner)
        change = change.values(lease_until=self._until(), **values)
        status = (await connection.execute(change.returning(batches.c.status))).scalar_one_or_none()
        if status is None:
            raise LeaseLost
        return str(status)

    def _until(self) -> str:
        return records.later(self._lease_s)


def _unleased() -> Any:
    return or_(batches.c.lease_until.is_(None), batches.c.lease_until < records.now())


async def prune(database: Database, retention_days: int) -> int:
    """Deletes files and batches whose time is over; returns how many files went."""
    ended = batches.c.ended_at < records.later(-retention_days * DAY_S)
    in_use = select(batches.c.input_file).where(batches.c.ended_at.is_(None))
    dead = files.c.created_at < records.later(-UNSEALED_S)
    old = select(files.c.id).where(
        or_(files.c.expires_at <= records.now(), files.c.whole.is_(False) & dead),
        files.c.id.not_in(in_use),
    )
    async with database.writing() as connection:
        await connection.execute(delete(batches).where(ended))
        gone: builtins.list[str] = list((await connection.execute(old)).scalars())
    for file_id in gone:
        async with database.writing() as connection:
            await connection.execute(delete(file_chunks).where(file_chunks.c.file == file_id))
            await connection.execute(delete(files).where(files.c.id == file_id))
    return len(gone)
