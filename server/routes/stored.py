"""What the routes of files and batches share: answers, failures of the store, parameters of lists."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import structlog
from fastapi import Response

from auth.errors import KeyStoreUnavailable
from server.errors import ApiError, unavailable

log = structlog.get_logger()

MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * 24 * 3600
"""Bounds of `expires_after`, as OpenAI has them."""


def json_answer(body: dict[str, Any]) -> Response:
    """200 with `body`."""
    return Response(orjson.dumps(body), media_type="application/json")


def page(items: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's API shows it."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more}


def bad_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 that names the field."""
    return ApiError(400, message, param=param, code=code)


@contextmanager
def stored() -> Iterator[None]:
    """A database that fails is 503."""
    try:
        yield
    except KeyStoreUnavailable as error:
        log.error("key_database_unavailable", reason=str(error))
        raise unavailable("The database can't be used at the moment.", retry_after_s=5) from None


@contextmanager
def not_found(
    kind: type[Exception], what: str, *, status: int = 404, param: str | None = None
) -> Iterator[None]:
    """`kind` is 404: there is none, or it is another tenant's, and nobody can tell which."""
    try:
        yield
    except kind:
        raise ApiError(status, f"No such {what}.", code="not_found", param=param or f"{what}_id") from None


def page_size(text: str | None, default: int, most: int) -> int:
    """The `limit` of a list. Raises ApiError."""
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most:
        return int(text)
    message = f"'limit' must be an integer from 1 to {most}."
    raise bad_field("limit", message)


def expiry_seconds(name: str, value: Any) -> int | None:
    """The seconds of `{"anchor": "created_at", "seconds": N}`; None is unset. Raises ApiError."""
    if value is None:
        return None
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        seconds = int(seconds)  # a form has texts alone
    if (
        isinstance(seconds, int)
        and not isinstance(seconds, bool)
        and MIN_KEEP_S <= seconds <= MAX_KEEP_S
        and value.get("anchor") == "created_at"
    ):
        return seconds
    message = f"'{name}' must have 'anchor' created_at and 'seconds' from {MIN_KEEP_S} to {MAX_KEEP_S}."
    raise bad_field(name, message)
