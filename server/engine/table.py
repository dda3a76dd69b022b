"""Which requests a gateway worker has in the engine, in memory that outlives the worker.

The engine core does not notice when a client dies: its requests run on to their end (seen on 0.32.0). The
core aborts by internal request id, so the supervisor must know each worker's ids even after a kill -9.
"""

import ctypes
from multiprocessing.context import BaseContext
from typing import Any

SLOTS = 8192
ID_BYTES = 96


def shared_table(context: BaseContext) -> Any:
    """Shared memory for one worker's ids; can be given to a Process of `context`."""
    return context.RawArray(ctypes.c_char, SLOTS * ID_BYTES)


def request_ids(memory: Any) -> list[str]:
    """All ids that stand in a table."""
    raw = bytes(memory)
    slots = (raw[start : start + ID_BYTES].rstrip(b"\0") for start in range(0, len(raw), ID_BYTES))
    return [slot.decode(errors="replace") for slot in slots if slot]


class RequestTable(dict[str, Any]):
    """vLLM's `OutputProcessor.request_states`, mirrored id by id into shared memory.

    Every engine request stands in that dict from before it is sent until it is finished or aborted, so
    the mirror is exact. Requests beyond the table's size are served but not mirrored.
    """

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self._memory = memory
        self._free = list(range(SLOTS - 1, -1, -1))
        self._slots: dict[str, int] = {}
        for slot in self._free:
            if memory[slot * ID_BYTES] != b"\0":  # the requests of an engine that is gone
                self._write(slot, b"")

    def _write(self, slot: int, value: bytes) -> None:
        start = slot * ID_BYTES
        self._memory[start : start + ID_BYTES] = value.ljust(ID_BYTES, b"\0")

    def __setitem__(self, request_id: str, state: Any) -> None:
        name = request_id.encode()
        if request_id not in self._slots and self._free and len(name) <= ID_BYTES:
            slot = self._slots[request_id] = self._free.pop()
            self._write(slot, name)
        super().__setitem__(request_id, state)

    def pop(self, request_id: str, *default: Any) -> Any:
        """As dict.pop."""
        state = super().pop(request_id, *default)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._write(slot, b"")
            self._free.append(slot)
        return state
