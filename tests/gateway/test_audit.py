"""The audit trail of a whole server, behind TLS and a proxy: every request once, also across restarts."""

import json
import os
import shutil
import signal
import ssl
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.hec import TOKEN, Collector
from tests import sse
from tests.certificates import Authority
from tests.conftest import Server, children, poll, running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "say something"}], "max_tokens": 4}
WORKERS = 2


def _records(state: Path) -> list[dict[str, Any]]:
    file = state / "lapilli" / "audit" / "audit.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _requests(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The records of requests by `client_request_id`; each is there once."""
    found = [record for record in records if record["event"] == "request" and record["client_request_id"]]
    counts = Counter(record["client_request_id"] for record in found)
    assert set(counts.values()) <= {1}
    return {record["client_request_id"]: record for record in found}


class Client:
    """Sends requests with ids of their own over TLS, and notes which were answered whole."""

    def __init__(self, server: Server, context: ssl.SSLContext) -> None:
        self._url = server.url.replace("http:", "https:")
        self._context = context
        self._key = server.key
        self.done: list[str] = []

    def send(self, name: str, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
        """One request on a connection of its own, so that all workers get some."""
        given = {"Authorization": f"Bearer {self._key}", "X-Request-Id": name} | headers
        answer = httpx.post(self._url + CHAT, json=body, headers=given, verify=self._context, timeout=60)
        self.done.append(name)
        return answer

    def many(self, start: int, count: int) -> None:
        """Requests called `r<number>`."""
        for number in range(start, start + count):
            assert self.send(f"r{number}").status_code == 200


@pytest.mark.slow
def test_every_request_is_recorded_once(tmp_path: Path) -> None:
    """Workers that die, a collector that is down and a restart of the server: file and collector have all."""
    authority = Authority(tmp_path, "ca")
    first, second = authority.sign("first"), authority.sign("second")
    context = ssl.create_default_context(cafile=str(authority.file))
    state = tmp_path / "state"
    collector = Collector().start()
    flags = ("--engine", "stub", "--stub.tokens_per_s", "500",
             "--gateway.workers", str(WORKERS), "--limits.store", "none",
             "--gateway.tls_cert_file", str(first[0]), "--gateway.tls_key_file", str(first[1]),
             "--gateway.trusted_proxies", "127.0.0.1", "--audit.content_tenants", "default",
             "--audit.hec_url", collector.url, "--audit.hec_token", TOKEN,
             "--audit.hec_delay_s", "0.1", "--audit.hec_ack_timeout_s", "2")  # fmt: skip
    with running(state, *flags, wait=False) as server:
        _wait_ready(server)
        client = Client(server, context)
        _check_fields(client, state)
        for source, target in zip(second, first, strict=True):
            shutil.copy(source, target)
        client.many(0, 20)
        poll(lambda: set(client.done) <= set(_requests(_records(state))), "all in the file")
        poll(lambda: _ids(state) <= set(collector.ids), "all at the collector")
        collector.stop()
        client.many(20, 10)
        # What the file has, the spool has, too, or will have in a moment.
        poll(lambda: server.metric("lapilli_audit_spool_bytes") > 10 * 400, "spooled")
        [victim, *_] = children(server.process.pid, "lapilli-worker")
        os.kill(victim, signal.SIGKILL)
        poll(lambda: server.metric("lapilli_worker_restarts_total") == 1, "replaced")
        poll(lambda: server.whole_health()["workers"]["serving"] == WORKERS, "both serve", 60)
        client.many(30, 10)
        key = server.key
        poll(lambda: set(client.done) <= set(_requests(_records(state))), "all in the file")
    with running(state, *flags, wait=False) as server:
        # Nobody holds the folders of a server that is gone: also what fewer workers would not find is sent.
        _wait_ready(server)
        collector.start()
        poll(lambda: _ids(state) <= set(collector.ids), "spool replayed", 30)
        assert server.metric("lapilli_audit_dropped_total") == 0
        poll(lambda: server.metric("lapilli_audit_spool_bytes") == 0, "spool empty")
        assert key not in json.dumps(_records(state)) + server.text
    collector.stop()
    assert set(_requests(_records(state))) == set(client.done)
    assert _shown(collector) == {record["event_id"]: record for record in _records(state)}


def _wait_ready(server: Server) -> None:
    def ready() -> bool:
        return server.process.poll() is not None or '"event": "ready"' in server.text

    poll(ready, "server ready", 240)
    assert server.process.poll() is None, server.text


def _ids(state: Path) -> set[str]:
    return {record["event_id"] for record in _records(state)}


def _shown(collector: Collector) -> dict[str, dict[str, Any]]:
    return {event["event"]["event_id"]: event["event"] for event in collector.events}


def _check_fields(client: Client, state: Path) -> None:
    """What is recorded of a good request, a stream, a refused one, one behind proxies, one that lies."""
    assert client.send("good").status_code == 200
    streamed = client.send("stream", BODY | {"stream": True}, **{"X-Forwarded-For": "6.6.6.6, 10.1.2.3"})
    refused = client.send(
        "refused", **{"Authorization": "Bearer wrong", "X-Forwarded-For": "say 'something'"}
    )
    assert client.send("wrong", BODY | {"model": "no-such-model"}).status_code == 404
    poll(lambda: len(_requests(_records(state))) == 4, "recorded")
    records = _requests(_records(state))
    good = records["good"]
    assert good["request_bytes"] == len(json.dumps(BODY, separators=(",", ":")))
    expected = {"tenant": "default", "key_id": "key_first", "client": "127.0.0.1", "path": CHAT,
                "status": 200, "outcome": "ok", "stream": False, "completion_tokens": 4}  # fmt: skip
    assert expected.items() <= good.items()
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert good["content"]["request"] == json.dumps(BODY, separators=(",", ":"))
    assert "chat.completion" in good["content"]["answer"]
    stream = records["stream"]
    assert (stream["client"], stream["stream"], stream["completion_tokens"]) == ("10.1.2.3", True, 4)
    assert stream["content"]["answer"] == streamed.text
    assert sse.read(streamed.text.splitlines())[1]
    assert refused.status_code == 401
    assert {
        "tenant": None,
        "status": 401,
        "outcome": "client_error",
        "client": None,
        "model": None,
    }.items() <= (records["refused"].items())
    assert "content" not in records["refused"]
    assert (records["wrong"]["status"], records["wrong"]["model"]) == (404, None)
