"""Fuzz over HTTP: whatever a client sends, the answer is 2xx or 4xx, and the server is as before."""

import copy
import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import MODEL, Server, poll
from tests.wire import connected

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CORPUS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": ["x"]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2,
            "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1.5}}),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "x"}],
            "tools": [TOOL], "tool_choice": "none", "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True,
            "n": 2, "top_logprobs": 3, "temperature": 0.5, "top_p": 0.9, "seed": 3,
            "response_format": {"type": "text"}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "stop_token_ids": [3], "stream": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2, "store": False}),
    ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"prompt": "hi", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]  # fmt: skip
PIECES = st.sampled_from(
    [b"GET ", b"POST ", b"/health", CHAT.encode(), b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b": ", b"0\r\n\r\n",
     b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Host: x", b"Connection: upgrade", b"Upgrade: h2c",
     b"Expect: 100-continue"]
)  # fmt: skip
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0, 0.1, float("nan")]),
    st.sampled_from(["", "x", "\0", "\ud800", "auto", "required", "a" * 5000, "{{ 7 }}", "<|im_end|>", "🦀"]),
    st.sampled_from([[], {}, [[]], [None], {"": None}, {"type": "x"}, [{}], {"type": "json_schema"}]),
    st.recursive(
        st.text(max_size=3) | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=8
    ),
).map(copy.deepcopy)  # they are changed in place
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
    yield
    with stub.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert client.post(CHAT, json=body, timeout=5).status_code == 200
    assert stub.metric("lapilli_worker_restarts_total") == stub.metric("lapilli_engine_restarts_total") == 0
    poll(stub.drained, "drained")
    assert "Traceback" not in stub.text
    assert "unhandled_error" not in stub.text


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good request with one to three values replaced, removed or added, and now and then bytes changed."""
    path, body = draw(st.sampled_from(CORPUS))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([place for place in _places(body) if place]))
        parent = body
        for key in way:
            parent = parent[key]
        if draw(st.booleans()) or isinstance(parent, list):
            parent[last] = draw(ODD_VALUES)
        elif draw(st.booleans()):
            del parent[last]
        else:
            parent[draw(st.sampled_from(["extra", "name", "type", "stream", "n", "tools", "user"]))] = draw(
                ODD_VALUES
            )
        if len(_places(body)) == 1:
            break
    data = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:
        start, stop = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        data = data[:start] + draw(st.binary(max_size=8)) + data[stop:]
    return path, data


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


def test_mutated_requests(stub: Server) -> None:
    """Good requests bent a little: served or refused in JSON, never 5xx."""
    seen: Counter[int] = Counter()
    with stub.client() as client:

        @QUIET
        @given(mutated())
        def check(request: tuple[str, bytes]) -> None:
            seen[_answered(client, *request)] += 1

        check()
    assert seen[200] > 10, seen
    assert seen[400] > 30, seen


def test_any_bytes_as_a_body(stub: Server) -> None:
    """No bytes at all are a good body by accident, and none is a fault of ours."""
    with stub.client() as client:

        @settings(QUIET, max_examples=60)
        @given(st.sampled_from(sorted({path for path, _ in CORPUS})), st.binary(max_size=300))
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
