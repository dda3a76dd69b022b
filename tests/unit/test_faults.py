"""A fault of ours whose exception quotes the request (case O32, 500): nothing of it gets out."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT

MARKER = "needle7f3a"
SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    import httpx
    from auth.audit import AuditLog
    from auth.services import Offer, Services
    from metrics.requests import RequestMetrics
    from server.audit_sections import AuditSettings
    from server.logs import configure_logging
    from server.middleware import BodyLimit, RequestScope
    from server.sections import LogSettings

    configure_logging(LogSettings(level="debug", format="json"), sees_requests=True)

    async def app(scope, receive, send):
        body = (await receive())["body"].decode()
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise RuntimeError(f"can't do {body} with {dict(scope['headers'])}") from ValueError(body)

    async def main():
        audit = AuditLog(AuditSettings(file=Path(sys.argv[1])), "worker-1")
        audit.open()
        audit.start()
        services = Services(None, Offer(("base",), tokens=False))
        layers = RequestScope(
            BodyLimit(app, 10_000, by_path={}), RequestMetrics("m"), services, limiter=None, audit=audit
        )
        transport = httpx.ASGITransport(layers, raise_app_exceptions=False)
        headers = {"Authorization": "Bearer " + sys.argv[2], "X-Marker": sys.argv[2]}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            for path in ("/early", "/late"):
                answer = await client.post(path, content=sys.argv[2])
                print(answer.status_code, answer.text)
        await audit.close()

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """What a process said and answered whose application failed twice, and its audit file."""
    file = tmp_path_factory.mktemp("fault") / "audit.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(file), MARKER]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True), file


def test_nothing_gets_out(fault: tuple["subprocess.CompletedProcess[str]", Path]) -> None:
    """Neither the answer nor the log nor the record quotes body or headers; the log says where it failed."""
    done, file = fault
    assert MARKER not in done.stdout + done.stderr + file.read_text()
    assert done.stdout.startswith("500 ")
    assert "internal_error" in done.stdout
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    errors = [line for line in lines if line["event"] == "unhandled_error"]
    assert len(errors) == 2
    assert errors[0]["exception"].startswith("RuntimeError\n")
    assert "raised from:\nValueError" in errors[0]["exception"]


def test_both_are_recorded(fault: tuple["subprocess.CompletedProcess[str]", Path]) -> None:
    """With how they ended: a whole 500, and an answer that broke off."""
    records = [json.loads(line) for line in fault[1].read_text().splitlines()]
    ends = [(record["path"], record["status"], record["outcome"]) for record in records]
    assert ends == [("/early", 500, "server_error"), ("/late", 200, "stream_error")]
    assert {record["request_bytes"] for record in records} == {len(MARKER)}
