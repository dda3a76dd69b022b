"""Two workers on one engine: what dies is replaced, what runs goes on, and SIGTERM cuts nobody early."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from tests import batches, sse
from tests.conftest import Server, children, poll, running

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "go on"}], "ignore_eos": True, "stream": True}
STUB = ("--engine", "stub", "--gateway.workers", "2", "--limits.store", "none", "--engine.stall_limit_s", "4",
        "--batch.lease_s", "1")  # fmt: skip


class Streams:
    """Streams that are read side by side; `ends` fills as they end."""

    def __init__(self, server: Server, count: int, max_tokens: int) -> None:
        self.started = threading.Semaphore(0)
        self.ends: list[tuple[list[dict[str, Any]], bool] | str] = []
        self._threads = [threading.Thread(target=self._one, args=(server, max_tokens)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self.started.acquire(timeout=30)

    def _one(self, server: Server, max_tokens: int) -> None:
        try:
            with (
                server.client() as client,
                client.stream("POST", CHAT, json=BODY | {"max_tokens": max_tokens}) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                self.started.release()
                self.ends.append(sse.read(lines))
        except httpx.TransportError as error:
            self.ends.append(type(error).__name__)

    def wait(self) -> list[tuple[list[dict[str, Any]], bool] | str]:
        """How each of them ended."""
        for thread in self._threads:
            thread.join(60)
        return self.ends


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stub with two workers; each test leaves it as it found it."""
    with running(tmp_path_factory.mktemp("pair"), *STUB, "--engine.spare_client_slots", "3") as server:
        yield server


def _whole(server: Server) -> bool:
    health = server.whole_health()
    return bool(health["ready"] and health["workers"]["serving"] == 2)


def _canary(server: Server) -> None:
    with server.client() as client:
        answer = client.post(CHAT, json=BODY | {"stream": False, "max_tokens": 1}, timeout=5)
    assert answer.status_code == 200


def test_several_workers_store_no_responses(pair: Server) -> None:
    """Each worker has its own memory: what needs a store is refused with the reason, the rest works."""
    path, body = "/v1/responses", {"input": "hi", "max_output_tokens": 2}
    with pair.client() as client:
        made = client.post(path, json=body)
        assert made.status_code == 200
        assert client.get(f"{path}/{made.json()['id']}").status_code == 404
        for change in ({"store": True}, {"background": True}, {"previous_response_id": made.json()["id"]}):
            refused = client.post(path, json=body | change)
            assert refused.status_code == 400
            assert "gateway.workers" in refused.json()["error"]["message"]


def test_a_killed_worker_is_replaced(pair: Server) -> None:
    """Its streams are cut and aborted in the engine; the other's run to their end; the port stays open."""
    streams = Streams(pair, 12, max_tokens=150)
    (first,) = children(pair.process.pid, "lapilli-worker-1")
    os.kill(first, signal.SIGKILL)
    ends = streams.wait()
    cut = [end for end in ends if isinstance(end, str)]
    whole = [end for end in ends if not isinstance(end, str) and end[1]]
    assert len(cut) + len(whole) == 12
    assert whole, "the other worker's streams were cut too"
    poll(pair.drained, "the dead worker's requests are gone from the engine", 15)
    poll(lambda: _whole(pair), "replaced", 60)
    (replaced,) = children(pair.process.pid, "lapilli-worker-1")
    assert replaced != first
    for _ in range(8):  # spread over both workers
        _canary(pair)
    assert pair.metric("lapilli_engine_restarts_total") == 0


def test_requests_of_a_killed_worker_do_not_run_on(pair: Server) -> None:
    """Nobody else aborts them, and they would run to max_tokens. A batch goes on where it was."""
    client = batches.client_of(pair)
    slow = [batches.line(f"s{number}", max_tokens=100, ignore_eos=True) for number in range(20)]
    batch = batches.start(client, [batches.line(f"q{number}") for number in range(10)] + slow)
    poll(lambda: _counts(client, batch.id)[0] >= 10, "some of the batch is done", 30)
    streams = Streams(pair, 8, max_tokens=30_000)
    for worker in children(pair.process.pid, "lapilli-worker"):
        os.kill(worker, signal.SIGKILL)
    assert all(isinstance(end, str) for end in streams.wait())
    poll(lambda: pair.metric("vllm:num_requests_running") == 0, "aborted in the engine", 15)
    poll(lambda: _whole(pair), "both replaced", 60)
    _canary(pair)
    found = batches.ended(client, batch.id, "completed", limit_s=60)
    assert _counts(client, batch.id) == (30, 0)
    done = [one["custom_id"] for one in batches.lines_of(client, found.output_file_id)]
    assert done == [f"q{number}" for number in range(10)] + [f"s{number}" for number in range(20)]


def _counts(client: OpenAI, batch_id: str) -> tuple[int, int]:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed, counts.failed


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "ended by itself"), (signal.SIGSTOP, "answered")]
)
def test_engine_death_and_stall(pair: Server, number: signal.Signals, says: str) -> None:
    """Open streams end with an error event, not ready meanwhile, and the engine is started again."""
    restarts = pair.metric("lapilli_engine_restarts_total")
    streams = Streams(pair, 4, max_tokens=30_000)
    (core,) = children(pair.process.pid, "stub-engine-core")
    os.kill(core, number)
    if number is signal.SIGKILL:
        poll(lambda: not pair.whole_health()["ready"], "not ready after the engine's death", 2)
    poll(lambda: not pair.whole_health()["ready"], "not ready once the stall is seen", 10)
    assert says in pair.whole_health()["reason"]
    for end in streams.wait():
        assert not isinstance(end, str)
        events, done = end
        assert not done
        assert events[-1]["error"]["code"] == "service_unavailable"
    poll(lambda: _whole(pair), "the engine is back", 120)
    _canary(pair)
    assert pair.metric("lapilli_engine_restarts_total") == restarts + 1
    poll(pair.drained, "drained")


def test_engine_starts_again_when_client_slots_are_spent(pair: Server) -> None:
    """A new worker without a slot would hold connections that nobody serves."""
    restarts = pair.metric("lapilli_engine_restarts_total")
    for _ in range(3):  # six new workers for three spare slots
        for worker in children(pair.process.pid, "lapilli-worker"):
            os.kill(worker, signal.SIGKILL)
        poll(lambda: pair.whole_health()["workers"]["serving"] == 0, "seen")
        poll(lambda: _whole(pair), "both replaced", 90)
    assert pair.metric("lapilli_engine_restarts_total") > restarts
    assert "no client slot is left" in pair.text
    _canary(pair)


def test_an_engine_that_keeps_dying_ends_the_server(tmp_path: Path) -> None:
    """With no restart left the exit code is 1, and no process stays behind."""
    with running(tmp_path, "--engine", "stub", "--engine.max_restarts", "0") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (core,) = children(server.process.pid, "stub-engine-core")
        os.kill(core, signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert "engine_given_up" in server.text
        poll(lambda: not any(child.is_running() for child in family), "no process left")


def test_sigterm_drains(tmp_path: Path) -> None:
    """Running streams get their end; readiness is false at once; new requests get 503 and no connection."""
    with running(tmp_path, *STUB) as server, ExitStack() as stack:
        family = psutil.Process(server.process.pid).children(recursive=True)
        keepers = [stack.enter_context(server.client()) for _ in range(6)]
        for keeper in keepers:  # connections that stay open, on both workers
            assert keeper.get("/v1/models").status_code == 200
        streams = Streams(server, 6, max_tokens=300)  # some seconds
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: httpx.get(f"{server.admin_url}/readyz").status_code == 503, "not ready at once", 1)
        for keeper in keepers:
            refused = keeper.post(CHAT, json=BODY)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        for end in streams.wait():
            assert not isinstance(end, str)
            events, done = end
            assert done
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0
        poll(lambda: not any(child.is_running() for child in family), "no process left")


def test_drain_limit_and_second_signal(tmp_path: Path) -> None:
    """At the limit the rest gets an error event, exit 0; a second SIGTERM does not wait for the limit."""
    for limit_s, signals in (("1", 1), ("600", 2)):
        with running(tmp_path / limit_s, *STUB, "--gateway.drain_timeout_s", limit_s) as server:
            streams = Streams(server, 4, max_tokens=30_000)
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                poll(lambda: httpx.get(f"{server.admin_url}/readyz").status_code == 503, "draining")
                server.process.send_signal(signal.SIGTERM)
            ends = streams.wait()
            assert server.process.wait(30) == 0
            if signals == 1:
                for end in ends:
                    assert not isinstance(end, str)
                    assert end[0][-1]["error"]["code"] == "service_unavailable"


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor: workers and engine core see it and end."""
    with running(tmp_path, *STUB) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= 4
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 20
        while any(_alive(child) for child in family) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [child for child in family if _alive(child)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
