"""Clients that are slow: in sending, in reading, or idle."""

import json
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Server, poll, running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stub that does not wait long for anybody, and takes few requests at a time."""
    flags = ("--engine", "stub", "--stub.tokens_per_s", "1000", "--gateway.request_timeout_s", "1.5",
             "--gateway.read_timeout_s", "1", "--gateway.keep_alive_timeout_s", "2",
             "--gateway.max_requests_in_flight", "4")  # fmt: skip
    with running(tmp_path_factory.mktemp("strict"), *flags) as server:
        yield server


def _connect(server: Server) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return connection


def _request(server: Server, **more: object) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "go on"}]} | more).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _to_the_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "sent",
    ["nothing", "part of the head", "part of the body", "a second head", "blank lines after an answer"],
)
def test_unfinished_requests_are_closed(strict: Server, sent: str) -> None:
    """Slowloris: whatever a client leaves unfinished, the connection is closed; 408 if it had begun."""
    request = _request(strict, max_tokens=1)
    whole = {"nothing": b"", "part of the head": request[:40], "part of the body": request[:-5]}
    with _connect(strict) as connection:
        if sent not in whole:
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /health HT" if sent == "a second head" else b"\r\n\r\n")
        else:
            connection.sendall(whole[sent])
        answer = _to_the_end(connection)
    assert (b"HTTP/1.1 408" in answer) == ("head" in sent or "body" in sent)
    poll(strict.drained, "drained")


def test_a_byte_now_and_then_does_not_help(strict: Server) -> None:
    """The limit holds for the whole request, not for each gap."""
    with _connect(strict) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")

        def cut() -> bool:
            try:
                connection.sendall(b"a")
            except OSError:
                return True
            return bool(select.select([connection], [], [], 0)[0])

        poll(cut, "cut", 15)


def test_a_reader_that_stalls_is_cut(strict: Server) -> None:
    """Its request ends in the engine, too, long before its 30 000 tokens are made."""
    with _connect(strict) as connection:
        more = {"stream": True, "max_tokens": 30_000, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
        connection.sendall(_request(strict, **more))
        poll(lambda: strict.metric("lapilli_requests_in_flight") == 1, "begun")
        poll(strict.drained, "cut", 20)
    assert strict.metric('lapilli_requests_total{endpoint="/v1/chat/completions"') >= 1
    assert strict.metric("vllm:generation_tokens_total") < 25_000


def test_requests_beyond_the_limit_get_503(strict: Server) -> None:
    """Four at a time are served, the others are told to come again; nobody hangs."""

    def one(_: int) -> int:
        with strict.client() as client:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "ignore_eos": True}
            return client.post(CHAT, json=body).status_code

    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(one, range(12)))
    assert set(statuses) == {200, 503}
    poll(strict.drained, "drained")
