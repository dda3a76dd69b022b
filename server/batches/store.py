"""Batches in the database, as clients see them. What a worker does with one is in leases.py."""

import re
import secrets
from typing import Any

from sqlalchemy import Row, func, insert, select, tuple_, update

from auth import records
from auth.database import Database
from auth.principal import Principal
from auth.schema import batches, files
from server.batches.files import FILE_ID, INPUT_PURPOSE, UnknownFile
from server.sections import BatchSettings

WINDOWS_S = {"24h": 24 * 3600.0}
"""Completion windows, as OpenAI has them."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

Batch = Row[Any]
"""A row of `batches`."""


class UnknownBatch(Exception):
    """The tenant has no batch of this id."""


class CannotCancel(Exception):
    """The batch is past the point; the message is its status."""


class TooManyBatches(Exception):
    """The tenant has batch.max_open_batches already."""


class BatchStore:
    """Batches of tenants. A failing database is KeyStoreUnavailable."""

    def __init__(self, database: Database, settings: BatchSettings, model: str) -> None:
        self._database = database
        self._settings = settings
        self._model = model

    async def create(
        self,
        owner: Principal,
        service: str,
        *,
        endpoint: str,
        input_file: str,
        window: str,
        metadata: dict[str, str] | None,
        output_expires_s: int | None,
    ) -> Batch:
        """A new batch of `owner`'s tenant. Raises UnknownFile, TooManyBatches."""
        if FILE_ID.fullmatch(input_file) is None:
            raise UnknownFile
        row = {
            "id": "batch_" + secrets.token_hex(16),
            "tenant": owner.tenant,
            "key_id": owner.key_id,
            "service": service,
            "model": self._model,
            "endpoint": endpoint,
            "completion_window": window,
            "input_file": input_file,
            "output_expires_s": output_expires_s,
            "metadata": metadata,
            "status": "validating",
            **dict.fromkeys(("total", "completed", "failed"), 0),
            "created_at": records.now(),
            "expires_at": records.later(WINDOWS_S[window]),
        }
        source = select(files.c.id).where(
            files.c.id == input_file,
            files.c.tenant == owner.tenant,
            files.c.purpose == INPUT_PURPOSE,
            files.c.whole,
            files.c.expires_at > row["created_at"],
        )
        running = select(func.count()).where(batches.c.tenant == owner.tenant, batches.c.ended_at.is_(None))
        async with self._database.writing() as connection:
            if (await connection.execute(source)).one_or_none() is None:
                raise UnknownFile
            if (await connection.execute(running)).scalar_one() >= self._settings.max_open_batches:
                raise TooManyBatches
            await connection.execute(insert(batches).values(row))
            return (await connection.execute(select(batches).where(batches.c.id == row["id"]))).one()

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises UnknownBatch."""
        if BATCH_ID.fullmatch(batch_id) is None:
            raise UnknownBatch
        query = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
        async with self._database.reading() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise UnknownBatch
        return row

    async def list(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of the tenant's batches, newest first, and whether more follow. Raises UnknownBatch."""
        query = select(batches).where(batches.c.tenant == tenant).limit(limit + 1)
        if after is not None:
            last = await self.get(tenant, after)
            query = query.where(tuple_(batches.c.created_at, batches.c.id) < tuple_(last.created_at, last.id))
        query = query.order_by(batches.c.created_at.desc(), batches.c.id.desc())
        async with self._database.reading() as connection:
            rows = list((await connection.execute(query)).all())
        return rows[:limit], len(rows) > limit

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Asks for the end of a batch; again is no error. Raises UnknownBatch, CannotCancel."""
        if BATCH_ID.fullmatch(batch_id) is None:
            raise UnknownBatch
        this = (batches.c.id == batch_id, batches.c.tenant == tenant)
        change = update(batches).where(*this, batches.c.status.in_(("validating", "in_progress")))
        async with self._database.writing() as connection:
            await connection.execute(change.values(status="cancelling", cancelling_at=records.now()))
            row = (await connection.execute(select(batches).where(*this))).one_or_none()
        if row is None:
            raise UnknownBatch
        if row.status not in ("cancelling", "cancelled"):
            raise CannotCancel(row.status)
        return row


def shown(batch: Batch) -> dict[str, Any]:
    """The batch as OpenAI's API shows it."""
    times = {f"{name}_at": _seconds(getattr(batch, f"{name}_at")) for name in TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": _seconds(batch.created_at),
        "expires_at": _seconds(batch.expires_at),
        **times,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def _seconds(moment: str | None) -> int | None:
    return None if moment is None else int(records.epoch_s(moment))
