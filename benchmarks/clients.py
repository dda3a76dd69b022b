"""Client processes that share one load, so that the load generator is not the limit."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks import load

MOST_PROCESSES = 8


def default_processes() -> int:
    """Half of the CPUs, 1 to 8."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))


def split(plan: load.Load, num_processes: int) -> list[load.Load]:
    """`plan` in parts, one for each process, equal to within one stream; each part has a stream at least."""
    parts = max(1, min(num_processes, plan.streams))
    streams, requests = _shares(plan.streams, parts), _shares(plan.requests, parts)
    firsts = [plan.first_number + sum(requests[:index]) for index in range(parts)]
    return [
        replace(plan, streams=s, requests=r, first_number=first)
        for s, r, first in zip(streams, requests, firsts, strict=True)
    ]


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


class Clients:
    """A pool of client processes that is started once and used for all loads."""

    def __init__(self, pool: Any, num_processes: int) -> None:
        self._pool = pool
        self.num_processes = num_processes

    def run(self, plan: load.Load) -> list[load.StreamResult]:
        """Sends `plan` from all processes at once; one result for each request."""
        parts = split(plan, self.num_processes)
        return [result for part in self._pool.map(load.run, parts, chunksize=1) for result in part]


@contextmanager
def clients(num_processes: int) -> Iterator[Clients]:
    """`num_processes` client processes, ended when the block is left."""
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield Clients(pool, num_processes)
