"""The shared table of a worker's requests."""

import multiprocessing
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.engine.table import SLOTS, RequestTable, request_ids, shared_table

CONTEXT = multiprocessing.get_context("forkserver")
MEMORY = shared_table(CONTEXT)

IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
STEPS = st.lists(st.tuples(st.booleans(), IDS))


@given(STEPS)
def test_mirror_is_exact(steps: list[tuple[bool, str]]) -> None:
    """Whatever is added and removed, the memory holds the dict's keys; a new table starts empty."""
    table = RequestTable(MEMORY)
    assert request_ids(MEMORY) == []
    for add, name in steps:
        if add:
            table[name] = object()
        else:
            table.pop(name, None)
        assert sorted(request_ids(MEMORY)) == sorted(table)


def test_more_requests_than_slots() -> None:
    """What does not fit is served all the same, and its place is not taken from others."""
    table = RequestTable(MEMORY)
    table["x" * 200] = None
    for number in range(SLOTS + 10):
        table[f"chatcmpl-{number}"] = None
    assert len(request_ids(MEMORY)) == SLOTS
    state: Any = object()
    assert table.pop("missing", state) is state
    for name in list(table):
        table.pop(name)
    assert request_ids(MEMORY) == []
