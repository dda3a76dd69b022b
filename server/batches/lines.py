"""The lines of a batch: of its input, read and checked, and of its output."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

MAX_CUSTOM_ID_CHARS = 512
MAX_FAULTS = 100
"""Faults of an input that are told; the rest is not looked at."""
ENVELOPE_BYTES = 4096
"""What a line may hold besides its body."""


class Line(msgspec.Struct):
    """One request: `body` is its JSON as it was written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True)
class Fault:
    """What is wrong with an input, as OpenAI's batch object tells it; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """The fault as JSON."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class LineFault(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


_decoder = msgspec.json.Decoder(Line)


def read_line(text: bytes, endpoint: str) -> Line:
    """The request that a line holds, its body unread. Raises LineFault, which quotes nothing of the line."""
    try:
        line = _decoder.decode(text)
    except msgspec.ValidationError:
        raise _missing(text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LineFault("invalid_json_line", "This line is not valid JSON.") from None
    if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise LineFault("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        raise LineFault("invalid_method", "'method' must be POST.", "method")
    if line.url != endpoint:
        raise LineFault("mismatched_url", "'url' must be the batch's endpoint.", "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise LineFault("invalid_body", "'body' must be a JSON object.", "body")
    return line


def _missing(text: bytes) -> LineFault:
    """Which of the fields is not there, or has another type."""
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        return LineFault("invalid_json_line", "This line is not a JSON object.")
    for name in ("custom_id", "method", "url"):
        if not isinstance(fields.get(name), str):
            return LineFault("missing_required_parameter", f"'{name}' must be a string.", name)
    return LineFault("missing_required_parameter", "'body' must be a JSON object.", "body")


class LineTooLong(Exception):
    """A line crosses the limit; `number` is which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number}")
        self.number = number


async def numbered_lines(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not blank with their numbers, from 1, without line ends. Raises LineTooLong."""
    rest, number = b"", 0
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for text in whole:
            number += 1
            if len(text) > max_bytes:
                raise LineTooLong(number)
            if text.strip():
                yield number, text.strip()
        if len(rest) > max_bytes:
            raise LineTooLong(number + 1)
    if rest.strip():
        yield number + 1, rest.strip()


class Checker:
    """Checks the lines of one input, one after another, and counts them."""

    def __init__(self, endpoint: str, max_requests: int) -> None:
        self._endpoint = endpoint
        self._max_requests = max_requests
        self._seen: set[str] = set()
        self.faults: list[Fault] = []
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether what is known is enough: further lines need no look."""
        return len(self.faults) >= MAX_FAULTS or self.total > self._max_requests

    def add(self, number: int, text: bytes) -> None:
        """The next line."""
        self.total += 1
        if self.total > self._max_requests:
            message = f"The file has more than {self._max_requests} requests."
            self.faults.append(Fault("too_many_requests", message))
            return
        try:
            line = read_line(text, self._endpoint)
        except LineFault as fault:
            self.faults.append(Fault(fault.code, fault.message, number, fault.param))
            return
        if line.custom_id in self._seen:
            message = "'custom_id' is the same as on an earlier line."
            self.faults.append(Fault("duplicate_custom_id", message, number, "custom_id"))
        self._seen.add(line.custom_id)


def answer_line(batch: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of output for a request that was answered; `body` is the answer's JSON."""
    head = {"id": f"batch_req_{batch.removeprefix('batch_')}_{number}", "custom_id": custom_id}
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, orjson.dumps(request_id), body)
    return orjson.dumps(head)[:-1] + b',"response":' + response + b',"error":null}'


def undone_line(batch: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """A line of output for a request that was never answered."""
    return orjson.dumps(
        {
            "id": f"batch_req_{batch.removeprefix('batch_')}_{number}",
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )
