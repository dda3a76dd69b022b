"""Files of tenants in the database: contents in chunks, so that no process holds a whole one."""

import re
import secrets
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import Row, Update, delete, exists, func, insert, select, tuple_, update

from auth import records
from auth.database import Database
from auth.schema import batches, file_chunks, files
from server.sections import BatchSettings

CHUNK_BYTES = 512 * 1024
MAX_FILENAME_CHARS = 255
DAY_S = 24 * 3600
INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
FILE_ID = re.compile(r"file-[0-9a-f]{32}")

File = Row[Any]
"""A row of `files`."""


class UnknownFile(Exception):
    """The tenant has no file of this id."""


class FileInUse(Exception):
    """A batch that has not ended reads this file."""


class NoSpace(Exception):
    """The tenant's files would take more than batch.max_stored_mib."""


class FileWriter:
    """A new file, written piece by piece; nobody sees it before `sealed`."""

    def __init__(self, database: Database, tenant: str, purpose: str, filename: str, keep_s: float) -> None:
        self._database = database
        self._row = {
            "id": "file-" + secrets.token_hex(16),
            "tenant": tenant,
            "purpose": purpose,
            "filename": filename,
            "created_at": records.now(),
            "expires_at": records.later(keep_s),
            "whole": False,
            "bytes": 0,
        }
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._chunks = 0
        self.size = 0
        """Bytes written so far."""

    @property
    def id(self) -> str:
        """The file's id."""
        return str(self._row["id"])

    async def write(self, piece: bytes) -> None:
        """Appends `piece`."""
        self._held.append(piece)
        self._held_bytes += len(piece)
        self.size += len(piece)
        if self._held_bytes >= CHUNK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Writes what is held back; a file without contents leaves no trace."""
        if not self._held:
            return
        chunk = {"file": self.id, "number": self._chunks, "content": b"".join(self._held)}
        async with self._database.writing() as connection:
            if self._chunks == 0:
                await connection.execute(insert(files).values(self._row))
            await connection.execute(insert(file_chunks).values(chunk))
        self._held, self._held_bytes = [], 0
        self._chunks += 1

    def sealed(self) -> Update:
        """The statement that makes the file whole, after `flush`."""
        return update(files).where(files.c.id == self.id).values(whole=True, bytes=self.size)


class FileStore:
    """Files in the database. A failing database is KeyStoreUnavailable."""

    def __init__(self, database: Database, settings: BatchSettings) -> None:
        self._database = database
        self._settings = settings

    @property
    def keep_s(self) -> int:
        """Seconds that files are kept, where nobody asks for less."""
        return self._settings.retention_days * DAY_S

    def writer(self, tenant: str, purpose: str, filename: str, keep_s: float | None = None) -> FileWriter:
        """A new file that is kept `keep_s` seconds, `batch.retention_days` at most."""
        kept = min(keep_s or self.keep_s, self.keep_s)
        return FileWriter(self._database, tenant, purpose, clean_filename(filename), kept)

    async def seal(self, writer: FileWriter, tenant: str) -> File:
        """Ends an upload. Raises NoSpace."""
        await writer.flush()
        query = select(files).where(files.c.id == writer.id)
        async with self._database.writing() as connection:
            if await self._stored(connection, tenant) + writer.size > self._settings.max_stored_mib * 2**20:
                raise NoSpace
            await connection.execute(writer.sealed())
            return (await connection.execute(query)).one()

    async def check_space(self, tenant: str) -> None:
        """Raises NoSpace where nothing more can be stored, before anything is received."""
        async with self._database.reading() as connection:
            if await self._stored(connection, tenant) >= self._settings.max_stored_mib * 2**20:
                raise NoSpace

    async def get(self, tenant: str, file_id: str) -> File:
        """Raises UnknownFile."""
        if FILE_ID.fullmatch(file_id) is None:
            raise UnknownFile
        async with self._database.reading() as connection:
            row = (await connection.execute(select(files).where(*_visible(tenant, file_id)))).one_or_none()
        if row is None:
            raise UnknownFile
        return row

    async def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, descending: bool
    ) -> tuple[list[File], bool]:
        """A page of the tenant's files by age, and whether more follow. Raises UnknownFile for `after`."""
        place = tuple_(files.c.created_at, files.c.id)
        query = select(files).where(*_visible(tenant)).limit(limit + 1)
        if purpose not in (None, INPUT_PURPOSE, OUTPUT_PURPOSE):
            return [], False
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if after is not None:
            last = await self.get(tenant, after)
            here = tuple_(last.created_at, last.id)
            query = query.where(place < here if descending else place > here)
        columns = (files.c.created_at, files.c.id)
        query = query.order_by(*(column.desc() if descending else column for column in columns))
        async with self._database.reading() as connection:
            rows = list((await connection.execute(query)).all())
        return rows[:limit], len(rows) > limit

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises UnknownFile, FileInUse."""
        if FILE_ID.fullmatch(file_id) is None:
            raise UnknownFile
        open_batch = select(batches.c.id).where(batches.c.input_file == file_id, batches.c.ended_at.is_(None))
        async with self._database.writing() as connection:
            if (await connection.execute(select(exists(open_batch)))).scalar_one():
                await self._check_owner(connection, tenant, file_id)
                raise FileInUse
            found = await connection.execute(delete(files).where(*_visible(tenant, file_id)))
            if found.rowcount == 0:
                raise UnknownFile
            await connection.execute(delete(file_chunks).where(file_chunks.c.file == file_id))

    async def chunks(self, file_id: str) -> AsyncIterator[bytes]:
        """The contents. Each chunk is a short transaction: a slow reader holds nothing open."""
        number = 0
        while True:
            query = select(file_chunks.c.content).where(
                file_chunks.c.file == file_id, file_chunks.c.number == number
            )
            async with self._database.reading() as connection:
                content = (await connection.execute(query)).scalar_one_or_none()
            if content is None:
                return
            yield bytes(content)
            number += 1

    async def _check_owner(self, connection: Any, tenant: str, file_id: str) -> None:
        query = select(files.c.id).where(*_visible(tenant, file_id))
        if (await connection.execute(query)).one_or_none() is None:
            raise UnknownFile

    async def _stored(self, connection: Any, tenant: str) -> int:
        total = select(func.coalesce(func.sum(files.c.bytes), 0)).where(files.c.tenant == tenant)
        return int((await connection.execute(total)).scalar_one())


def _visible(tenant: str, file_id: str | None = None) -> list[Any]:
    conditions = [files.c.tenant == tenant, files.c.whole, files.c.expires_at > records.now()]
    return conditions if file_id is None else [*conditions, files.c.id == file_id]


def clean_filename(name: str) -> str:
    """The last part of a path, printable, of bounded length."""
    last = re.split(r"[/\\]", name)[-1]
    kept = "".join(character if character.isprintable() else "_" for character in last)
    return kept[-MAX_FILENAME_CHARS:].strip() or "file"


def shown(file: File) -> dict[str, Any]:
    """The file as OpenAI's API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(records.epoch_s(file.created_at)),
        "expires_at": int(records.epoch_s(file.expires_at)),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
