"""Background work of an object with a life of its own."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Tasks that nobody awaits, kept from the garbage collector until they are done."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside all else."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self) -> None:
        """Cancels what still runs."""
        for task in list(self._running):
            task.cancel()
