"""A Lapilli server as a child process, for benchmarks: start, key, CPU time, memory."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

START_LIMIT_S = 600


@dataclass
class RunningServer:
    """A server that is ready; `gateway` is its gateway process, without the engine core."""

    url: str
    key: str
    start_s: float
    """Seconds from the command to /health 200."""
    gateway: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds (user and system) the gateway has used so far."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        """Resident memory of the gateway in MiB."""
        return float(self.gateway.memory_info().rss / 2**20)


@contextmanager
def lapilli(*flags: str) -> Iterator[RunningServer]:
    """`lapilli serve FLAGS` on a free port, with a database of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "server",
                    "serve",
                    "--port",
                    str(port),
                    "--log-level",
                    "warning",
                    *flags,
                ],
                env=os.environ | {"XDG_STATE_HOME": folder},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_ready(url, process, log)
            start_s = time.monotonic() - started
            (key,) = set(re.findall(r"lapilli_[A-Za-z0-9_-]{43}", log.read_text()))
            yield RunningServer(url, key, start_s, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.1)
    raise SystemExit(f"the server did not get ready:\n{log.read_text()}")
