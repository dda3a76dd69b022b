"""/v1/batches: files of requests, worked on in the background."""

from typing import Any

from fastapi import APIRouter, Request, Response

from server.batches.calls import ENDPOINTS
from server.batches.files import UnknownFile
from server.batches.store import WINDOWS_S, CannotCancel, TooManyBatches, UnknownBatch, shown
from server.errors import ApiError
from server.gateway import context_of, gateway_of
from server.routes.access import caller
from server.routes.body import json_body
from server.routes.stored import (
    bad_field,
    expiry_seconds,
    json_answer,
    not_found,
    page,
    page_size,
    stored,
)
from server.validation.strict_json import read_object

router = APIRouter()

PATH = "/v1/batches"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 64, 512
DEFAULT_PAGE, MAX_PAGE = 20, 100


@router.post(PATH)
async def create(request: Request) -> Response:
    """Creates a batch from a file that was uploaded."""
    principal, gateway = await caller(request), gateway_of(request)
    fields = read_object(await json_body(request))
    endpoint = _one_of(fields, "endpoint", ENDPOINTS)
    window = _one_of(fields, "completion_window", WINDOWS_S)
    input_file = fields.get("input_file_id")
    if not isinstance(input_file, str):
        raise bad_field("input_file_id", "'input_file_id' must be a string.", "missing_required_parameter")
    service = context_of(request).service or gateway.services.table.plain
    with stored(), not_found(UnknownFile, "file", status=400, param="input_file_id"):
        try:
            batch = await gateway.batches.create(
                principal,
                service.name,
                endpoint=endpoint,
                input_file=input_file,
                window=window,
                metadata=_metadata(fields.get("metadata")),
                output_expires_s=expiry_seconds("output_expires_after", fields.get("output_expires_after")),
            )
        except TooManyBatches:
            message = "Too many of your batches have not ended; wait for some of them."
            raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"}) from None
    return json_answer(shown(batch))


@router.get(PATH)
async def list_batches(request: Request) -> Response:
    """The tenant's batches, newest first."""
    principal, query = await caller(request), request.query_params
    with stored(), not_found(UnknownBatch, "batch", status=400, param="after"):
        found, more = await gateway_of(request).batches.list(
            principal.tenant,
            after=query.get("after"),
            limit=page_size(query.get("limit"), DEFAULT_PAGE, MAX_PAGE),
        )
    return json_answer(page([shown(batch) for batch in found], more=more))


@router.get(PATH + "/{batch_id}")
async def retrieve(request: Request, batch_id: str) -> Response:
    """A batch as it stands."""
    principal = await caller(request)
    with stored(), not_found(UnknownBatch, "batch"):
        return json_answer(shown(await gateway_of(request).batches.get(principal.tenant, batch_id)))


@router.post(PATH + "/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str) -> Response:
    """Ends a batch; what is done by then is in its files."""
    principal = await caller(request)
    with stored(), not_found(UnknownBatch, "batch"):
        try:
            batch = await gateway_of(request).batches.cancel(principal.tenant, batch_id)
        except CannotCancel as error:
            message = f"Cannot cancel a batch with status '{error}'."
            raise ApiError(409, message, code="batch_not_cancellable") from None
    return json_answer(shown(batch))


def _one_of(fields: dict[str, Any], name: str, known: dict[str, Any]) -> str:
    value = fields.get(name)
    if isinstance(value, str) and value in known:
        return value
    message = f"'{name}' must be one of {', '.join(known)}."
    raise bad_field(name, message, "missing_required_parameter" if value is None else "invalid_value")


def _metadata(value: Any) -> dict[str, str] | None:
    """Up to 16 texts by name, as OpenAI bounds them."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise bad_field("metadata", f"'metadata' must be an object of at most {MAX_METADATA} entries.")
    for key, text in value.items():
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARS or len(key) > MAX_METADATA_KEY_CHARS:
            message = (
                f"'metadata' holds texts of at most {MAX_METADATA_CHARS} characters, "
                f"their names at most {MAX_METADATA_KEY_CHARS}."
            )
            raise bad_field("metadata", message)
    return value
