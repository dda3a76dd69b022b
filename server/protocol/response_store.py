"""Stored responses of /v1/responses: in this process's memory, bounded, each its caller's own."""

import asyncio
from collections import Counter, deque
from typing import Any

import orjson
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

OPEN = ("queued", "in_progress")
"""Statuses of a response that is still being made."""


class ResponseStore:
    """Responses by id, oldest first, with their owners.

    `responses`, `messages` and `events` are filled by vLLM's serving class (`response_store`, `msg_store` and
    `event_store` there, which it never empties). Sizes are bytes as JSON. When all together are above
    `max_bytes`, the owner who holds most loses the oldest: one caller can't push out the others' responses.
    """

    def __init__(self, max_bytes: int) -> None:
        self.responses: dict[str, ResponsesResponse] = {}
        self.messages: dict[str, Any] = {}
        self.events: dict[str, tuple[deque[Any], asyncio.Event]] = {}
        self._max_bytes = max_bytes
        self._owners: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def open(self, response_id: str, owner: str) -> None:
        """A response that `owner` (a key's id) is about to have; `settle` follows."""
        self._owners[response_id] = owner

    def find(self, response_id: str, owner: str) -> ResponsesResponse | None:
        """The response, where there is one and it is `owner`'s."""
        return self.responses.get(response_id) if self._owners.get(response_id) == owner else None

    def settle(self, response_id: str) -> None:
        """The response is done: it makes room for itself where it was stored, else nothing is left of it."""
        if response_id not in self.responses:
            self.forget(response_id)
            return
        self._sizes[response_id] = self._size(response_id)
        while sum(self._sizes.values()) > self._max_bytes:
            self.forget(self._next_to_go())

    def forget(self, response_id: str) -> None:
        """Nothing is left of the response."""
        for part in (self.responses, self.messages, self.events, self._owners, self._sizes):
            part.pop(response_id, None)

    def _size(self, response_id: str) -> int:
        events = self.events.get(response_id, ((), None))[0]
        return (
            len(self.responses[response_id].model_dump_json())
            + len(orjson.dumps(self.messages.get(response_id), default=str))
            + sum(len(event.model_dump_json()) for event in events)
        )

    def _next_to_go(self) -> str:
        held: Counter[str] = Counter()
        for response_id, size in self._sizes.items():
            held[self._owners[response_id]] += size
        ((greediest, _),) = held.most_common(1)
        return next(found for found in self._sizes if self._owners[found] == greediest)
