"""Case O32: no key and no content in logs, metrics, error bodies and audit records, whatever happens."""

import base64
import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.hec import TOKEN, Collector
from tests.conftest import Server, children, poll, running

CHAT = "/v1/chat/completions"
WORDS = {name: f"zq{name}7f3a91" for name in ("prompt", "key", "args", "user", "header", "field", "output")}
MARKED_KEY = "lapilli_" + (WORDS["key"] + "x" * 43)[:43]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": json.dumps({"q": WORDS["args"]})},
}
GOOD: dict[str, Any] = {
    "user": WORDS["user"],
    "max_tokens": 3,
    "tools": [TOOL],
    "tool_choice": "none",
    "messages": [
        {"role": "user", "content": WORDS["prompt"]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": WORDS["output"]},
    ],
}
FIELD = WORDS["field"]
BAD_FIELDS: list[dict[str, Any]] = [
    {"temperature": FIELD},
    {"max_tokens": FIELD},
    {"messages": FIELD},
    {"messages": [{"role": FIELD, "content": FIELD}]},
    {"messages": [{"role": "user", "content": [{"type": FIELD, "text": FIELD}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": [FIELD]}}]}]},
    {"tools": [{"type": FIELD, "function": FIELD}]},
    {"tool_choice": {"type": "function", "function": {"name": FIELD}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": FIELD}}}},
    {"response_format": {"type": FIELD}},
    {"structured_outputs": {"regex": f"({FIELD}"}},
    {"stop": {"a": FIELD}},
    {"logit_bias": {FIELD: 1}},
    {"stream_options": FIELD},
    {"user": [FIELD]},
    {"metadata": FIELD},
    {"n": FIELD},
    {"seed": FIELD},
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """The audit collector."""
    with Collector() as running_collector:
        yield running_collector


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """A server that logs at debug and audits to a file and a collector."""
    flags = ("--engine", "stub", "--stub.tokens_per_s", "50", "--gateway.max_body_bytes", str(2**20),
             "--log-level", "debug", "--audit.hec_url", collector.url, "--audit.hec_token", TOKEN,
             "--audit.hec_delay_s", "0.1", "--gateway.trusted_proxies", "127.0.0.1")  # fmt: skip
    with running(tmp_path_factory.mktemp("watched"), *flags) as server:
        yield server


def _leaks(text: str) -> list[str]:
    """Which marker words stand in `text`, plain or in base64."""
    found = [word for word in WORDS.values() if word in text]
    for word in WORDS.values():
        for shift in range(3):
            encoded = base64.b64encode(b"x" * shift + word.encode()).decode()[4:-4]
            found += [f"base64 of {word}"] if encoded in text else []
    return found


def _records(server: Server) -> list[dict[str, Any]]:
    file = server.state / "lapilli" / "audit" / "audit.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _abort_a_stream(server: Server) -> None:
    """A client that leaves after the first event."""
    body = json.dumps(GOOD | {"stream": True, "max_tokens": 500, "ignore_eos": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    head += "Content-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(
            f"{head}X-Marker: {WORDS['header']}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def _bad_requests(client: httpx.Client) -> Iterator[httpx.Response]:
    for fields in BAD_FIELDS:
        yield client.post(CHAT, json=GOOD | fields)
    yield client.post("/v1/completions", json={"prompt": [FIELD, 1], "user": FIELD})
    yield client.post(CHAT, content=f'{{"messages": [{{"role": "user", "content": "{FIELD}'.encode())
    yield client.post(CHAT, content=json.dumps(FIELD))
    yield client.post(CHAT, json=GOOD | {"messages": [{"role": "user", "content": f"{FIELD} " * 40_000}]})
    yield client.post(CHAT, content=FIELD.encode() * 200_000)
    yield client.get(CHAT, params={"q": FIELD})
    for headers in (
        {"Authorization": f"Bearer {MARKED_KEY}"},
        {"Authorization": f"Bearer {WORDS['key']}"},
        {"Authorization": f"Basic {base64.b64encode(WORDS['key'].encode()).decode()}"},
        {"Authorization": WORDS["key"]},
        {"X-API-Key": MARKED_KEY},
        {"X-Request-Id": MARKED_KEY, "Cookie": f"a={WORDS['key']}"},
    ):
        yield client.post(CHAT, json=GOOD | {"temperature": FIELD}, headers=headers)


def test_no_marker_anywhere(watched: Server, collector: Collector) -> None:
    """200, streams, every kind of 4xx, disconnect, and an engine that dies; at log level debug."""
    with watched.client(**{"X-Marker": WORDS["header"], "Content-Type": "application/json"}) as client:
        assert client.post(CHAT, json=GOOD).status_code == 200
        with client.stream("POST", CHAT, json=GOOD | {"stream": True}) as answer:
            assert b"[DONE]" in answer.read()
        answers = list(_bad_requests(client))
        statuses = {answer.status_code for answer in answers}
        assert statuses >= {400, 401, 405, 413}
        assert not [status for status in statuses if status >= 500]
        assert not [answer.text for answer in answers if _leaks(answer.text)]
        _abort_a_stream(watched)
        poll(watched.drained, "drained")
        with client.stream(
            "POST", CHAT, json=GOOD | {"stream": True, "max_tokens": 500, "ignore_eos": True}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            [core] = children(watched.process.pid, "stub-engine-core")
            os.kill(core, signal.SIGKILL)
            rest = "\n".join(line for line in lines if '"error"' in line)
            assert "error" in rest
    poll(lambda: "disconnected" in {record["outcome"] for record in _records(watched)}, "audited")
    outputs = {
        "log": "\n".join(line for line in watched.text.splitlines() if line.startswith("{")),
        "metrics": httpx.get(f"{watched.admin_url}/metrics", timeout=30).text,
        "audit": json.dumps(_records(watched)),
        "stream": rest,
    }
    assert '"event": "request"' in outputs["log"]
    assert {name: _leaks(text) for name, text in outputs.items()} == {name: [] for name in outputs}
    assert watched.key not in outputs["log"] + outputs["audit"]
    assert MARKED_KEY not in outputs["log"] + outputs["audit"]
    ids = [record["event_id"] for record in _records(watched)]
    poll(lambda: set(ids) <= set(collector.ids), "all at the collector")
    assert _leaks(json.dumps(collector.events)) == []
