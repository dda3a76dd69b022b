"""What a soak ends with: nothing in flight, a canary answered, memory and file descriptors as before."""

import asyncio
import re
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks import processes
from benchmarks.servers import RunningServer
from benchmarks.traffic import CHAT, Seen, whole_outcome
from benchmarks.wire import Target, connected, request

WORKER = re.compile(r"lapilli-worker-")
GAUGES = (
    "lapilli_requests_in_flight",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
QUIET_LIMIT_S = 15.0
CANARY_LIMIT_S = 5.0
REPLACE_LIMIT_S = 60.0
MOST_GROWTH = 0.05
REPLACED_WARM_S = 30.0
"""Age at which the memory of a worker that came later is first taken."""
SPARE_FDS = 32
"""The key database's pool may hold 15 connections of two files each, once a worker has started under load."""


@dataclass(frozen=True)
class Check:
    """One criterion."""

    name: str
    passed: bool
    what: str


def workers(root: psutil.Process) -> list[psutil.Process]:
    """The gateway worker processes (`lapilli-worker-N`) of a server, oldest first; none with one worker."""
    found = [member.process for member in processes.tree(root) if WORKER.search(member.title)]
    return sorted(found, key=lambda process: float(process.create_time()))


def gauge(page: str, name: str) -> float | None:
    """Sum over all series of one metric in Prometheus text; None when there is none."""
    pattern = re.compile(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", re.MULTILINE)
    values = [float(value) for value in pattern.findall(page)]
    return sum(values) if values else None


class Watch:
    """Follows memory and descriptors of each front-end process, and asks the server how it is."""

    def __init__(self, server: RunningServer, target: Target, run_s: float) -> None:
        self._target = target
        self.server = server
        self._run_s = run_s
        self._started_at = time.monotonic()
        self._rss: dict[int, list[tuple[float, float]]] = {}
        """Process id to (seconds since the traffic began, MiB)."""
        self._fds: dict[int, int] = {}
        self._idle: dict[str, float | None] = {}
        self.num_workers = 0

    async def baseline(self) -> None:
        """The idle state after a few requests, before the traffic."""
        for _ in range(8):
            await self.canary()
        await asyncio.sleep(1)
        self._fds = self._descriptors()
        self._idle = await self.gauges()
        self.num_workers = len(workers(self.server.root))
        self._started_at = time.monotonic()

    def sample(self) -> None:
        """Takes the memory of each front-end process."""
        now = time.monotonic() - self._started_at
        for pid, mib in processes.rss_mib(processes.gateway(self.server.root)).items():
            self._rss.setdefault(pid, []).append((now, mib))

    def memory(self) -> dict[str, dict[str, Any]]:
        """For each process that still runs and lived long enough: MiB early, at the end and between."""
        early_s = self._run_s / 10
        rows: dict[str, dict[str, Any]] = {}
        for pid in processes.rss_mib(processes.gateway(self.server.root)):
            samples = self._rss.get(pid, [])
            born = samples[0][0] if samples else 0.0
            warm = early_s if born < early_s / 2 else born + REPLACED_WARM_S
            settled = [mib for at, mib in samples if at >= warm]
            if len(settled) > 1:
                growth = settled[-1] / settled[0] - 1
                rows[str(pid)] = {
                    "early_mib": round(settled[0], 1),
                    "end_mib": round(settled[-1], 1),
                    "growth": round(growth, 4),
                    "between_mib": [round(mib) for mib in settled[:: 1 + len(settled) // 20]],
                }
        return rows

    def _descriptors(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for process in processes.gateway(self.server.root):
            try:
                found[process.pid] = int(process.num_fds())
            except psutil.Error:
                continue
        return found

    def descriptors_over(self) -> dict[int, str]:
        """Processes with more descriptors than at the start; a later worker may have as many as the first."""
        most = max(self._fds.values(), default=0)
        return {
            pid: f"{number} against {self._fds.get(pid, most)}"
            for pid, number in self._descriptors().items()
            if number > self._fds.get(pid, most) + SPARE_FDS
        }

    async def gauges(self) -> dict[str, float | None]:
        """The gauges that have to come back to zero."""
        page = await asyncio.to_thread(self._metrics)
        return {name: gauge(page, name) for name in GAUGES}

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.server.admin_url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    async def descriptors_back(self) -> dict[int, str]:
        """`descriptors_over` once it is empty, or what it says after QUIET_LIMIT_S."""
        ends_at = time.monotonic() + QUIET_LIMIT_S
        while True:
            over = self.descriptors_over()
            if not over or time.monotonic() > ends_at:
                return over
            await asyncio.sleep(0.5)

    async def until_quiet(self) -> tuple[float | None, dict[str, float | None]]:
        """Seconds until all gauges are back (None: not within QUIET_LIMIT_S), and what they said last."""
        began = time.monotonic()
        while True:
            try:
                values = await self.gauges()
            except OSError:
                values = dict.fromkeys(GAUGES)
            idle = {name: self._idle.get(name) or 0.0 for name in GAUGES if "kv_cache" in name}
            if all(value is not None and value <= idle.get(name, 0.0) for name, value in values.items()):
                return time.monotonic() - began, values
            if time.monotonic() - began > QUIET_LIMIT_S:
                return None, values
            await asyncio.sleep(0.25)

    async def canary(self) -> str:
        """One short request; `ok`, or what came instead."""
        body = {"model": self._target.model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        try:
            async with asyncio.timeout(CANARY_LIMIT_S), connected(self._target) as connection:
                await connection.send(request(self._target, CHAT, body))
                status = await connection.status()
                return whole_outcome(await connection.body(), 1) if status == 200 else f"status {status}"
        except (OSError, TimeoutError) as error:
            return type(error).__name__

    async def workers_back(self) -> bool:
        """Whether there are as many workers as at the start, within REPLACE_LIMIT_S."""
        ends_at = time.monotonic() + REPLACE_LIMIT_S
        while len(workers(self.server.root)) < self.num_workers:
            if time.monotonic() > ends_at:
                return False
            await asyncio.sleep(0.5)
        return True


async def all_checks(watch: Watch, seen: Seen) -> list[Check]:
    """Every criterion, in the order in which they have to be looked at: gauges before the canary."""
    if not watch.server.alive():
        return [Check("alive", False, f"the server has ended, see {watch.server.log}")]
    quiet_s, gauges = await watch.until_quiet()
    canary = await watch.canary()
    watch.sample()
    checks = [
        Check("answers", *_answers(seen)),
        Check("gauges", quiet_s is not None, f"{_seconds(quiet_s)} after the traffic: {_shown(gauges)}"),
        Check("canary", canary == "ok", f"{canary}, limit {CANARY_LIMIT_S} s"),
        Check("memory", *_memory(watch)),
        Check("descriptors", *_descriptors(await watch.descriptors_back())),
    ]
    if watch.num_workers:
        back = await watch.workers_back()
        checks.append(Check("workers", back, f"{len(seen.kills_at)} killed, {watch.num_workers} wanted"))
    return checks


def _answers(seen: Seen) -> tuple[bool, str]:
    bad = seen.unexplained()
    return bad == 0, f"{bad} of {seen.total()} neither as expected nor due to a fault that was made"


def _memory(watch: Watch) -> tuple[bool, str]:
    rows = watch.memory()
    what = ", ".join(f"{r['early_mib']:.0f} to {r['end_mib']:.0f} MiB" for r in rows.values())
    grown = [row for row in rows.values() if row["growth"] >= MOST_GROWTH]
    return bool(rows) and not grown, what or "no process lived long enough"


def _descriptors(over: dict[int, str]) -> tuple[bool, str]:
    return not over, f"over the start: {over}" if over else "as at the start"


def _seconds(value: float | None) -> str:
    return f"not within {QUIET_LIMIT_S} s" if value is None else f"{value:.1f} s"


def _shown(gauges: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in gauges.items())
