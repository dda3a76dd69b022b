"""Servers as child processes: start, readiness, key, CPU time and memory of the front end, stop."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import processes
from benchmarks.specs import EngineOptions, Spec, UnavailableError, command, environment, has_admin_port

START_LIMIT_S = 600
STOP_LIMIT_S = 45
KEY = re.compile(r"lapilli_[A-Za-z0-9_-]{43}")
LOG_LINES = 12


class StartError(Exception):
    """A server did not get ready; the message holds the end of its log."""


@dataclass
class RunningServer:
    """A server that is ready; `root` is the process that was started, the first of its front end."""

    name: str
    url: str
    admin_url: str
    """Where /health and /metrics tell of all workers together."""
    key: str
    model: str
    start_s: float
    """Seconds from the command to /health 200."""
    root: psutil.Process
    log: Path
    _used_s: dict[int, float] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU seconds (user and system) of all front-end processes since the last call of this."""
        used = processes.cpu_s(processes.gateway(self.root))
        spent = sum(seconds - self._used_s.get(pid, 0.0) for pid, seconds in used.items())
        self._used_s = used
        return spent

    def rss_mib(self) -> float:
        """Resident memory of all front-end processes in MiB; shared pages count in each process."""
        return sum(processes.rss_mib(processes.gateway(self.root)).values())

    def pss_mib(self) -> float | None:
        """Memory of all front-end processes in MiB, shared pages counted once; None if not known."""
        return processes.pss_mib(processes.gateway(self.root))

    def alive(self) -> bool:
        """Whether the first process still runs."""
        return bool(self.root.is_running() and self.root.status() != psutil.STATUS_ZOMBIE)

    def described(self) -> list[dict[str, Any]]:
        """Each process with its side, CPU seconds and memory, to check how they were told apart."""
        members = processes.tree(self.root)
        used = processes.cpu_s(member.process for member in members)
        rss = processes.rss_mib(member.process for member in members)
        return [
            {
                "title": member.title[:100],
                "side": member.side,
                "cpu_s": round(used.get(member.process.pid, 0.0), 2),
                "rss_mib": round(rss.get(member.process.pid, 0.0)),
            }
            for member in members
        ]


def end_on_sigterm() -> None:
    """Lets SIGTERM end this process as an exception does, so that its servers are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextmanager
def started(spec: Spec, options: EngineOptions, log: Path) -> Iterator[RunningServer]:
    """One server on a free port with state of its own; raises StartError and UnavailableError."""
    port, admin_port = free_port(), free_port()
    arguments = command(spec, options, port, admin_port)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        started_at = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                arguments,
                env=environment(spec, options, Path(state)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        url = f"http://127.0.0.1:{port}"
        admin_url = f"http://127.0.0.1:{admin_port}" if has_admin_port(spec) else url
        try:
            _wait_ready(admin_url, process, log)
            start_s = time.monotonic() - started_at
            key = _key(log) if spec.kind == "lapilli" else "none"
            root = psutil.Process(process.pid)
            yield RunningServer(spec.name, url, admin_url, key, _model(url, key), start_s, root, log)
        finally:
            _stop(process)


@contextmanager
def all_started(
    specs: list[Spec], options: EngineOptions, logs: Path, *, together: bool
) -> Iterator[tuple[dict[str, RunningServer], dict[str, str]]]:
    """All servers that start, by name, and why the others did not; one after another, or `together`."""
    logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, RunningServer] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:

        def start(spec: Spec) -> None:
            entered = started(spec, options, logs / f"{spec.name.replace(':', '-')}.log")
            try:
                running[spec.name] = entered.__enter__()
                stack.push(entered.__exit__)
            except (StartError, UnavailableError) as error:
                failed[spec.name] = str(error)
                print(f"{spec.name} is left out: {error}", flush=True)

        with ThreadPoolExecutor(len(specs) if together else 1) as pool:
            list(pool.map(start, specs))
        ordered = {spec.name: running[spec.name] for spec in specs if spec.name in running}
        yield ordered, failed


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if _all_serve(answer.read()):
                    return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
        time.sleep(0.1)
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    raise StartError(f"{log.stem} did not get ready; the end of its log {log}:\n" + "\n".join(lines))


def _all_serve(health: bytes) -> bool:
    """Whether all workers that /health counts do serve; True where it counts none."""
    if not health.startswith(b"{"):
        return True
    workers = json.loads(health).get("workers", {})
    return bool(workers.get("serving") == workers.get("of"))


def _key(log: Path) -> str:
    found = KEY.search(log.read_text(errors="replace"))
    if found is None:
        raise StartError(f"no API key in {log}")
    return found.group()


def _model(url: str, key: str) -> str:
    """The name under which the server knows its model."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise StartError(f"{url}/v1/models names no model: {type(error).__name__}") from error


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a server; what is left of its process tree after STOP_LIMIT_S seconds is killed."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for survivor in psutil.wait_procs(family, timeout=10)[1]:
        with contextlib.suppress(psutil.Error):
            survivor.kill()
