"""/v1/files: what batches read and write."""

from collections.abc import AsyncIterator, Awaitable
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from auth.principal import Principal
from server.batches.files import INPUT_PURPOSE, FileInUse, FileStore, FileWriter, NoSpace, UnknownFile, shown
from server.errors import ApiError
from server.gateway import gateway_of
from server.routes.access import caller
from server.routes.body import refuse_encoded
from server.routes.stored import (
    bad_field,
    expiry_seconds,
    json_answer,
    not_found,
    page,
    page_size,
    stored,
)
from server.sections import BatchSettings

router = APIRouter()

T = TypeVar("T")

PATH = "/v1/files"
FORM_BYTES = 64 * 1024
"""What a form may hold besides the file."""
READ_BYTES = 256 * 1024
MAX_PAGE = 10_000
IN_USE = ApiError(409, "A batch that has not ended reads this file.", code="file_in_use")


def max_upload_bytes(settings: BatchSettings) -> int:
    """Largest body of an upload."""
    return settings.max_file_mib * 2**20 + FORM_BYTES


@router.post(PATH)
async def create(request: Request) -> Response:
    """Uploads a file (multipart/form-data): `purpose` is `batch`, `file` is JSONL."""
    principal, gateway = await caller(request), gateway_of(request)
    store, limit = gateway.files, gateway.settings.batch.max_file_mib
    with stored():
        await _within_space(store.check_space(principal.tenant))
    upload = await _upload(request)
    try:
        if (upload.file.size or 0) > limit * 2**20:
            raise _too_large(limit)
        writer = store.writer(principal.tenant, INPUT_PURPOSE, upload.file.filename or "", upload.keep_s)
        with stored():
            await _copy(upload.file, writer)
            return json_answer(shown(await _within_space(store.seal(writer, principal.tenant))))
    finally:
        await upload.file.close()


@router.get(PATH)
async def list_files(request: Request) -> Response:
    """The tenant's files, newest first."""
    principal, query = await caller(request), request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", "'order' must be asc or desc.")
    with stored(), not_found(UnknownFile, "file", status=400, param="after"):
        found, more = await gateway_of(request).files.list(
            principal.tenant,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=page_size(query.get("limit"), MAX_PAGE, MAX_PAGE),
            descending=order == "desc",
        )
    return json_answer(page([shown(file) for file in found], more=more))


@router.get(PATH + "/{file_id}")
async def retrieve(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    principal = await caller(request)
    with stored(), not_found(UnknownFile, "file"):
        return json_answer(shown(await gateway_of(request).files.get(principal.tenant, file_id)))


@router.get(PATH + "/{file_id}/content")
async def content(request: Request, file_id: str) -> Response:
    """A file's contents."""
    principal, store = await caller(request), gateway_of(request).files
    with stored(), not_found(UnknownFile, "file"):
        file = await store.get(principal.tenant, file_id)
    headers = {
        "Content-Length": str(file.bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(
        _contents(store, file.id), headers=headers, media_type="application/octet-stream"
    )


@router.delete(PATH + "/{file_id}")
async def delete(request: Request, file_id: str) -> Response:
    """Deletes a file that no running batch reads."""
    principal: Principal = await caller(request)
    with stored(), not_found(UnknownFile, "file"):
        try:
            await gateway_of(request).files.delete(principal.tenant, file_id)
        except FileInUse:
            raise IN_USE from None
    return json_answer({"id": file_id, "object": "file", "deleted": True})


class _Upload(NamedTuple):
    file: UploadFile
    keep_s: int | None


async def _upload(request: Request) -> _Upload:
    """The form, its file on disk where it is large. Raises ApiError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        message = "The Content-Type header must be 'multipart/form-data'."
        raise ApiError(415, message, code="unsupported_media_type")
    refuse_encoded(request)
    try:
        form = await request.form(max_files=1, max_fields=8, max_part_size=1024)
    except HTTPException:
        raise ApiError(400, "The form is not valid multipart/form-data.", code="invalid_form") from None
    file = form.get("file")
    try:
        if not isinstance(file, UploadFile):
            raise bad_field("file", "'file' must be a file.", "missing_required_parameter")
        if form.get("purpose") != INPUT_PURPOSE:
            raise bad_field("purpose", "'purpose' must be 'batch'.")
        if not file.size:
            raise bad_field("file", "The file is empty.")
        after = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
        keep_s = expiry_seconds("expires_after", after if any(after.values()) else None)
    except ApiError:
        await form.close()
        raise
    return _Upload(file, keep_s)


async def _copy(file: UploadFile, writer: FileWriter) -> None:
    while piece := await file.read(READ_BYTES):
        await writer.write(piece)


async def _within_space(work: Awaitable[T]) -> T:
    try:
        return await work
    except NoSpace:
        message = "Your files take all the space there is for them; delete some."
        raise ApiError(400, message, code="storage_limit_exceeded") from None


async def _contents(store: FileStore, file_id: str) -> AsyncIterator[bytes]:
    async for chunk in store.chunks(file_id):
        yield chunk


def _too_large(max_file_mib: int) -> ApiError:
    return ApiError(
        413, f"The file is larger than {max_file_mib} MiB.", code="request_too_large", param="file"
    )
