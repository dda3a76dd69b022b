"""Limits of whole servers over the stub engine: places that come back, two workers, Redis away."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from tests import sse
from tests.conftest import Server, free_port, poll, redis_server, running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "go on"}]}
ROUNDS = 20


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker, limits in memory: one request at a time, 50 output tokens, two seconds for a body."""
    flags = ("--limits.parallel_requests", "1", "--limits.max_output_tokens", "50")
    slow = ("--gateway.request_timeout_s", "2", "--stub.tokens_per_s", "100")
    with running(tmp_path_factory.mktemp("single"), "--engine", "stub", *flags, *slow) as server:
        yield server


def _after_two_chunks(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert [next(lines).startswith("data: ") for _ in range(3)] == [True, False, True]


def _slow_body(server: Server) -> None:
    """A request whose body never ends."""
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=30) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(4096)


def test_the_only_place_comes_back(single: Server) -> None:
    """Case O13: (a) a stream that is left, (b) a bad body, (c) unknown model, (d) too long, (e) timeout."""
    with single.client() as client:

        def one() -> httpx.Response:
            return client.post(CHAT, json=BODY | {"max_tokens": 1})

        too_long = BODY | {"messages": [{"role": "user", "content": "word " * 40_000}]}
        for turn in range(ROUNDS):
            _after_two_chunks(client)
            poll(lambda: one().status_code == 200, "the place of a stream that was left", 2)
            for bad, status in (({"messages": 3}, 400), (BODY | {"model": "none"}, 404), (too_long, 400)):
                if bad is too_long and turn % 10:
                    continue
                assert client.post(CHAT, json=bad).status_code == status
                assert one().status_code == 200
        _slow_body(single)
        poll(lambda: one().status_code == 200, "the place of a request that timed out", 2)
    assert single.metric("lapilli_limits_open_reservations") == 0
    assert single.metric("lapilli_requests_in_flight") == 0


def test_the_place_is_free_with_the_last_byte(single: Server) -> None:
    """A client that goes on at once is never refused; one that comes too early is told when to come."""
    with single.client() as client, single.client() as other:
        for turn in range(ROUNDS):
            body = BODY | {"max_tokens": 3, "stream": turn % 2 == 0}
            assert client.post(CHAT, json=body).status_code == 200
        with client.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
            early = other.post(CHAT, json=BODY)
            assert early.status_code == 429
            assert early.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(early.headers["retry-after"]) <= 30
            assert sse.read(answer.iter_lines())[1]
        assert other.post(CHAT, json=BODY).status_code == 200
    assert single.metric('lapilli_rate_limited_total{limit="parallel_requests"}') >= 1


def test_output_is_held_to_the_limit(single: Server) -> None:
    """Who asks for more gets 400, who says nothing gets what is allowed; on every API that generates."""
    model = "SmolLM2-135M-Instruct"
    with single.client() as client:
        for name in ("max_tokens", "max_completion_tokens"):
            answer = client.post(CHAT, json=BODY | {name: 51})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        silent = client.post(CHAT, json=BODY).json()
        assert silent["usage"]["completion_tokens"] == 50
        assert silent["choices"][0]["finish_reason"] == "length"
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 51}).status_code == 400
        assert client.post("/v1/responses", json={"input": "a", "max_output_tokens": 51}).status_code == 400
        message = {"model": model, "messages": BODY["messages"], "max_tokens": 51}
        assert client.post("/v1/messages", json=message).status_code == 400
        answer = client.post("/v1/responses", json={"input": "a", "store": False})
        assert answer.json()["usage"]["output_tokens"] == 50
        assert client.post(CHAT, json=BODY | {"max_tokens": 1}).status_code == 200


@dataclass
class Shared:
    """Two workers over one Redis."""

    server: Server
    url: str
    port: int
    folder: Path
    redis: Any


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Ten requests and a thousand tokens per minute, counted for both workers together."""
    folder, port = tmp_path_factory.mktemp("shared"), free_port()
    with redis_server(folder, port) as (url, process):
        flags = ("--engine", "stub", "--gateway.workers", "2", "--stub.tokens_per_s", "1000")
        limits = ("--limits.store", "redis", "--limits.redis_url", url, "--limits.redis_timeout_s", "10")
        bounds = ("--limits.requests_per_min", "10", "--limits.tokens_per_min", "1000")
        with running(folder / "server", *flags, *limits, *bounds) as server:
            yield Shared(server, url, port, folder, process)


def _at_once(server: Server, count: int, body: dict[str, Any]) -> list[httpx.Response]:
    """The answers to `count` requests at the same instant, each on a connection of its own."""

    with server.client() as client, ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _number: client.post(CHAT, json=body), range(count)))


def test_a_burst_over_two_workers(shared: Shared) -> None:
    """Case O14: of 50 at once exactly 10 pass; of 5 that may use 600 of 1000 tokens exactly one."""
    counts = redis.Redis.from_url(shared.url)
    for _ in range(5):
        counts.flushall()
        answers = _at_once(shared.server, 50, BODY | {"max_tokens": 1})
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (10, 40)
        assert all(1 <= int(a.headers["retry-after"]) <= 60 for a in answers if a.status_code == 429)
    for _ in range(ROUNDS):
        counts.flushall()
        # Each goes on long enough to be there while the last one comes.
        answers = _at_once(shared.server, 5, BODY | {"max_tokens": 580, "ignore_eos": True})
        passed = [answer for answer in answers if answer.status_code == 200]
        assert [answer.status_code for answer in answers].count(429) == 4
        assert sum(answer.json()["usage"]["total_tokens"] for answer in passed) <= 1000
    counts.flushall()
    for _ in range(2):  # settled: the second finds what the first did not use
        again = _at_once(shared.server, 1, BODY | {"max_tokens": 580})[0]
        assert again.status_code == 200


def test_redis_dies_and_comes_back(shared: Shared) -> None:
    """Without Redis 503 with Retry-After; with it again, 200, and nobody has started anything anew."""
    counts = redis.Redis.from_url(shared.url)
    counts.flushall()
    assert _at_once(shared.server, 1, BODY | {"max_tokens": 1})[0].status_code == 200
    shared.redis.kill()
    shared.redis.wait()
    answer = _at_once(shared.server, 1, BODY)[0]
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "service_unavailable"
    with redis_server(shared.folder, shared.port):

        def good() -> bool:
            answers = _at_once(shared.server, 4, BODY | {"max_tokens": 1})
            counts.flushall()
            return [item.status_code for item in answers] == [200] * 4

        poll(good, "limits work again", 20)
