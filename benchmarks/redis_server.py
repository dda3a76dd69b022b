"""A Redis of a benchmark's own."""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

from benchmarks.servers import free_port

START_LIMIT_S = 20.0


class RedisServer:
    """`redis-server` on a free port."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        """Starts it; FileNotFoundError where it is not installed. `durable`: it keeps all over a restart."""
        if shutil.which("redis-server") is None:
            raise FileNotFoundError("redis-server is not installed")
        self._port = free_port()
        self._folder = folder
        self._durable = durable
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.client: Any = redis.Redis(port=self._port, decode_responses=True, socket_timeout=5)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, where it does not run, and waits until it answers. Raises TimeoutError."""
        if self._process is None:
            command = ["redis-server", "--port", str(self._port), "--bind", "127.0.0.1"]
            command += ["--dir", str(self._folder), "--save", ""]
            command += ["--appendonly", "yes" if self._durable else "no"]
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        ends_at = time.monotonic() + START_LIMIT_S
        while time.monotonic() < ends_at:
            with contextlib.suppress(redis.RedisError):
                if self.client.ping():
                    return
            time.sleep(0.05)
        raise TimeoutError("Redis did not start")

    def end(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=START_LIMIT_S)
            self._process = None

    def close(self) -> None:
        """Ends it for good."""
        self.client.close()
        self.end()
