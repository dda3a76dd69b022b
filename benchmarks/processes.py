"""Which processes of a server are its front end, which its engine; their CPU time and memory.

A server is a process tree. Told apart by what a process calls itself (its name or command line), see
`side`: vLLM titles its engine core, workers and API servers, Lapilli its workers and the stub.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil

Side = Literal["gateway", "engine"]

ENGINE_TITLE = re.compile(r"EngineCore|VLLM::(Worker|DPCoordinator)|stub-engine", re.IGNORECASE)
GATEWAY_TITLE = re.compile(
    r"VLLM::APIServer|lapilli-|vllm-rs|multiprocessing[.](forkserver|resource_tracker)"
)
SPAWNED = re.compile(r"multiprocessing[.]spawn")
MIB = 2**20


def side(title: str, parent: Side) -> Side:
    """The side of a process called `title` below one of side `parent`.

    What belongs to an engine stays with it. A spawned process that names itself nothing is an engine core:
    front-end processes of all servers measured here have titles.
    """
    if parent == "engine" or ENGINE_TITLE.search(title):
        return "engine"
    if GATEWAY_TITLE.search(title):
        return "gateway"
    return "engine" if SPAWNED.search(title) else "gateway"


@dataclass(frozen=True)
class Member:
    """One process of a server."""

    process: psutil.Process
    title: str
    side: Side


def title_of(process: psutil.Process) -> str:
    """Name and command line of a process; empty when it is gone."""
    try:
        return f"{process.name()} {' '.join(process.cmdline())}".strip()
    except psutil.Error:
        return ""


def tree(root: psutil.Process) -> list[Member]:
    """All processes of the server whose first process is `root` (which is front end), parents first."""
    members = [Member(root, title_of(root), "gateway")]
    for member in members:
        try:
            children = member.process.children()
        except psutil.Error:
            continue
        for child in children:
            title = title_of(child)
            members.append(Member(child, title, side(title, member.side)))
    return members


def gateway(root: psutil.Process) -> list[psutil.Process]:
    """The front-end processes of a server, the first process first."""
    return [member.process for member in tree(root) if member.side == "gateway"]


def cpu_s(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """CPU seconds (user and system) used so far by each process id; what is gone is left out."""
    used: dict[int, float] = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        used[process.pid] = float(times.user + times.system)
    return used


def rss_mib(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """Resident memory in MiB by process id. Pages that processes share count in each of them."""
    resident: dict[int, float] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            resident[process.pid] = process.memory_info().rss / MIB
    return resident


def pss_mib(processes: Iterable[psutil.Process]) -> float | None:
    """Memory in MiB of all together, shared pages counted once; None where the kernel does not tell."""
    try:
        return round(sum(float(process.memory_full_info().pss) for process in processes) / MIB)
    except (psutil.Error, AttributeError, OSError):
        return None
