"""A request's body as a JSON object, read strictly."""

import json
from typing import Any

import msgspec
import orjson

from server.errors import ApiError

LARGE_VALUE_BYTES = 2048
"""Values from this size on are left out where top-level names are counted."""
START_BYTES = 64
MAX_FIELDS = 128
"""Names at the top of a body; the largest request model knows some 60."""


def read_object(body: bytes) -> dict[str, Any]:
    """The object that `body` holds.

    Raises ApiError for what is not UTF-8 or not strict JSON (NaN, Infinity, numbers too large for a double,
    lone surrogates, nesting of more than 1024 levels), for what is not an object, and for a name that stands
    twice at the top with different values: two readers would take different ones.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(f"The body is not valid JSON: {error.msg}.") from None
    if not isinstance(fields, dict):
        raise _invalid("The body must be a JSON object.")
    if len(fields) > MAX_FIELDS:
        raise _invalid(f"The body has more than {MAX_FIELDS} fields.")
    _check_duplicates(body, fields)
    return fields


def _check_duplicates(body: bytes, fields: dict[str, Any]) -> None:
    """Refuses top-level names that stand twice and disagree.

    orjson keeps the last one and says nothing, and Python's own reader, which tells, is slow on long texts.
    So large values (usually one long text) are left out first, and names found once need no look.
    """
    short = _without_large_values(body) if len(body) > LARGE_VALUE_BYTES else body
    # A name may be spelled with escapes; those of ASCII letters begin so.
    if b"\\u00" not in short and all(short.count(b'"%b"' % name.encode()) == 1 for name in fields):
        return
    # Values that were left out look unlike their equal twins: in doubt the whole body tells.
    if _disagree(short) and (short is body or _disagree(body)):
        raise _invalid("A field of the body is given twice, with different values.")


def _without_large_values(body: bytes) -> bytes:
    """The same object with large top-level values replaced by 0."""
    parts, position = [], 0
    for value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).values():
        text = bytes(value)
        if len(text) < LARGE_VALUE_BYTES:
            continue
        # What follows a name is soon found by its start; a search for the whole would read it all first.
        start = body.find(text[:START_BYTES], position)
        if start >= 0 and body.startswith(text, start):
            parts.append(body[position:start])
            position = start + len(text)
    parts.append(body[position:])
    return b"0".join(parts)


def _disagree(body: bytes) -> bool:
    seen: dict[str, Any] = {}
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs).items
        return any(seen.setdefault(name, value) != value for name, value in pairs)
    except RecursionError:
        raise _invalid("The body is nested too deeply.") from None


class _Pairs:
    """A JSON object as the pairs that were written."""

    def __init__(self, items: list[tuple[str, Any]]) -> None:
        self.items = items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pairs) and self.items == other.items

    __hash__ = None  # type: ignore[assignment]


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
