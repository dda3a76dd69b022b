"""Prompts and outputs for the records of tenants that asked for them (audit.content_tenants)."""

from typing import Any

MAX_PART_BYTES = 2**18
"""Most bytes of a request's body, and of its answer, that a record holds."""


class Content:
    """The body of a request and what was answered, as it went over the wire, each up to MAX_PART_BYTES."""

    def __init__(self, request: bytes) -> None:
        self._request = request[:MAX_PART_BYTES]
        self._answer = bytearray()
        self._truncated = len(request) > MAX_PART_BYTES

    def answered(self, part: bytes) -> None:
        """A further part of the answer has been sent."""
        room = MAX_PART_BYTES - len(self._answer)
        self._answer += part[:room]
        self._truncated = self._truncated or len(part) > room

    def fields(self) -> dict[str, Any]:
        """What the record holds."""
        return {
            "request": self._request.decode(errors="replace"),
            "answer": self._answer.decode(errors="replace"),
            "truncated": self._truncated,
        }
