"""A dead worker for whose replacement the engine has no client slot left."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.config import Settings

CONNECTIONS = 64


def _listener(port: int = 0) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
    listener.setblocking(False)
    return listener


def _shares(*listeners: socket.socket) -> list[int]:
    """How many of CONNECTIONS connections each listener gets."""
    clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(CONNECTIONS)]
    shares = [0] * len(listeners)
    for index, listener in enumerate(listeners):
        while True:
            try:
                listener.accept()[0].close()
            except OSError:  # none is left, or it does not listen
                break
            shares[index] += 1
    for client in clients:
        client.close()
    return shares


class _Host:
    """An engine without a free slot."""

    def __init__(self) -> None:
        self.restarts: list[str] = []

    def take_slot(self) -> None:
        return None

    def restart(self, reason: str) -> None:
        self.restarts.append(reason)


async def _supervisor_of_two(listeners: list[socket.socket]) -> Any:
    """A supervisor whose first worker is attached and whose second one has come and wants to be."""
    from server.supervisor import Supervisor, WorkerProcess

    supervisor: Any = Supervisor(Settings(), None, listeners, listeners[0], lambda: None)
    supervisor._host = _Host()
    for number, listener in enumerate(listeners):
        killed: list[bool] = []
        process = SimpleNamespace(
            pid=0, sentinel=listener.fileno(), killed=killed, kill=lambda k=killed: k.append(True), join=int
        )
        worker: Any = WorkerProcess(f"worker-{number}", process, Any, listener, None)
        worker.channel = SimpleNamespace(close=lambda: None)
        worker.greeted = True
        supervisor._workers.append(worker)
    supervisor._workers[0].host = supervisor._host
    return supervisor


def test_the_others_get_its_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits at a port that nobody serves; a new engine takes it back; the last worker restarts it."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    started: list[str] = []

    async def story() -> None:
        first = _listener()
        second = _listener(first.getsockname()[1])
        supervisor = await _supervisor_of_two([first, second])
        monkeypatch.setattr(supervisor, "_start_worker", lambda name, _listener: started.append(name))
        host, (one, two) = supervisor._host, supervisor._workers
        assert min(_shares(first, second)) > 0

        supervisor._attach(two)
        assert two.process.killed
        supervisor._worker_died(two)
        assert _shares(first, second) == [CONNECTIONS, 0]
        assert not started
        assert not host.restarts

        supervisor._take_back()
        assert started == ["worker-1"]
        assert min(_shares(first, second)) > 0

        one.host = None
        supervisor._attach(one)
        assert len(host.restarts) == 1
        assert not one.process.killed

    asyncio.run(story())
