"""Servers for the tests: real processes on free loopback ports, started once where tests can share them."""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parent.parent
START_LIMIT_S = 240
MODEL = "SmolLM2-135M-Instruct"
KEY = re.compile(r"lapilli_[A-Za-z0-9_-]{43}")


def poll(check: Callable[[], object], what: str, limit_s: float = 10.0) -> None:
    """Waits until `check()` is true; fails the test after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if check():
            return
        time.sleep(0.05)
    pytest.fail(f"not within {limit_s} s: {what}")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A running `lapilli serve`."""

    url: str
    process: "subprocess.Popen[bytes]"
    admin_url: str
    log: Path
    state: Path

    @property
    def text(self) -> str:
        """All that it printed, stdout and stderr."""
        return self.log.read_text(errors="replace")

    @property
    def key(self) -> str:
        """The first API key, as printed."""
        found = KEY.search(self.text)
        assert found, self.text
        return found.group()

    def client(self, **headers: str) -> httpx.Client:
        """An HTTP client with the first key."""
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"} | headers, timeout=60
        )

    def health(self) -> int:
        """Status of /health; 0 while nothing listens."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def whole_health(self) -> dict[str, Any]:
        """/health of the admin port: of all workers together."""
        return dict(httpx.get(f"{self.admin_url}/health", timeout=30).json())

    def wait_ready(self) -> None:
        """Waits until /health is 200 and all workers serve."""

        def ready() -> bool:
            if self.process.poll() is not None:
                return True
            workers = self.whole_health()["workers"] if self.health() == 200 else {"serving": 0, "of": 1}
            return bool(workers["serving"] == workers["of"])

        poll(ready, "server ready", START_LIMIT_S)
        assert self.process.poll() is None, self.text

    def metric(self, name: str) -> float:
        """Sum over all series of one metric (`name` may carry labels)."""
        page = httpx.get(f"{self.admin_url}/metrics", timeout=30).text
        lines = [line for line in page.splitlines() if line.startswith(name)]
        whole = [line for line in lines if "{" in name or line[len(name)] in " {"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in whole)

    def drained(self) -> bool:
        """No request in the gateway, none in the engine."""
        return (
            self.metric("lapilli_requests_in_flight") == 0
            and self.metric("vllm:num_requests_running") == 0
            and self.metric("vllm:num_requests_waiting") == 0
        )

    def cli(self, *args: str) -> str:
        """Standard output of `lapilli ARGS` with this server's database."""
        env = os.environ | {"XDG_STATE_HOME": str(self.state)}
        command = [sys.executable, "-m", "server", *args]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=ROOT).stdout


@contextmanager
def running(folder: Path, *flags: str, wait: bool = True) -> Iterator[Server]:
    """A server with `flags`, its state in `folder`; ended (and its engine with it) on leaving."""
    port, admin = free_port(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    env = os.environ | {"XDG_STATE_HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", "--port", str(port), "--admin.port", str(admin),
             "--log.format", "json", "--limits.requests_per_s", "5000", *flags],
            cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_end_with_parent,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", process, f"http://127.0.0.1:{admin}", log, folder)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        end(process)


def _end_with_parent() -> None:
    """SIGTERM for the server when pytest is killed (prctl 2): nothing else would end it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, and SIGKILL to the whole group where that is not enough."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children(pid: int, name: str) -> list[int]:
    """Process ids below `pid` whose command line holds `name`."""
    import psutil

    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile
            if name in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@contextmanager
def redis_server(
    folder: Path, port: int | None = None, *flags: str
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A Redis that keeps nothing on disk, in `folder`; yields its URL and process, ended on leaving."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (CI installs it)")
    port = port or free_port()
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        poll(lambda: _accepts(port), "Redis accepts connections")
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis shared by all tests that use accounts of their own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as (url, _):
        yield url


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over the stub engine, shared by all tests that only read and write requests."""
    flags = ("--engine", "stub", "--stub.tokens_per_s", "200", "--gateway.max_body_bytes", str(2**20),
             "--gateway.cors_origins", "https://app.example,http://localhost:3000")  # fmt: skip
    with running(tmp_path_factory.mktemp("stub"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over the real engine with the demo model, started once."""
    with running(tmp_path_factory.mktemp("real")) as server:
        yield server
