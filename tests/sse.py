"""Reading server-sent events strictly: what the wire may hold, and nothing else."""

import json
from collections.abc import Iterable
from typing import Any


def strict_loads(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def read(lines: Iterable[str]) -> tuple[list[Any], bool]:
    """The data objects of a stream, and whether it ended with [DONE] (once, last)."""
    events: list[Any] = []
    done = False
    for line in lines:
        if not line or line.startswith(":"):
            continue
        assert line.startswith("data: "), line
        assert not done, "data after [DONE]"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            done = True
        else:
            events.append(strict_loads(data))
    return events, done


def text_of(events: list[Any]) -> str:
    """The joined content deltas of choice 0."""
    return "".join(
        choice["delta"].get("content") or ""
        for event in events
        for choice in event.get("choices", [])
        if choice["index"] == 0
    )
