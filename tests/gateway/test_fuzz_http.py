"""Fuzz over HTTP: whatever a client sends, the answer is 2xx or 4xx, and the server is as before."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Server, poll
from tests.wire import connected

CHAT = "/v1/chat/completions"
PATHS = (
    *(CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)
PIECES = st.sampled_from(
    [b"GET ", b"POST ", b"/health", CHAT.encode(), b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b": ", b"0\r\n\r\n",
     b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Host: x", b"Connection: upgrade", b"Upgrade: h2c",
     b"Expect: 100-continue"]
)  # fmt: skip
QUIET = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(autouse=True)
def canary(stub: Server) -> Iterator[None]:
    """After each test a plain request passes, nothing is left in the engine, nothing is in the log."""
    before = len(stub.text)
    yield
    with stub.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert client.post(CHAT, json=body, timeout=5).status_code == 200
    assert stub.metric("lapilli_worker_restarts_total") == stub.metric("lapilli_engine_restarts_total") == 0
    poll(stub.drained, "drained")
    assert "Traceback" not in stub.text[before:]
    assert "unhandled_error" not in stub.text[before:]


def _answered(client: httpx.Client, path: str, body: bytes) -> int:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (path, body[:300], answer.text)
    assert answer.status_code in (200, 400, 404, 413), (path, body[:300], answer.text)
    if answer.status_code != 200:
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert any(
            end in answer.text[-3000:]
            for end in ("[DONE]", "message_stop", "response.completed", "response.incomplete")
        )
    return answer.status_code


def test_any_bytes_as_a_body(stub: Server) -> None:
    """No bytes at all are a good body by accident, and none is a fault of ours."""
    with stub.client() as client:

        @settings(QUIET, max_examples=60)
        @given(st.sampled_from(PATHS), st.binary(max_size=300))
        def check(path: str, body: bytes) -> None:
            assert _answered(client, path, body) in (400, 404)

        check()


def test_any_bytes_on_the_wire(stub: Server) -> None:
    """Bytes that are hardly HTTP: refused as 4xx or closed, and never an answer of another request."""

    @settings(QUIET, max_examples=80)
    @given(st.lists(st.one_of(PIECES, st.binary(max_size=12)), max_size=12))
    def check(parts: list[bytes]) -> None:
        with connected(stub) as wire:
            wire.send(b"".join(parts))
            wire.socket.shutdown(socket.SHUT_WR)
            said = b""
            while part := wire.socket.recv(65536):
                said += part
        assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200", b"HTTP/1.1 100")), said[:200]

    check()
