"""The audit trail of one process: queue, file, spool, adoption, shutdown, and what is never in a record."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from auth import audit_lane
from auth.audit import AuditLog
from auth.audit_check import SUPERVISOR, problem
from auth.audit_file import RotatingFile
from auth.audit_records import admin_record, request_record
from auth.principal import Principal
from benchmarks.hec import TOKEN, Collector
from metrics.audit import AuditMetrics
from server.audit_sections import AuditSettings
from server.cli import run_command
from server.config_sources import SettingsError, load_settings
from server.context import RequestContext


def _settings(folder: Path, **more: object) -> AuditSettings:
    base = {
        "file": folder / "audit.jsonl",
        "spool_dir": folder / "spool",
        "hec_token": TOKEN,
        "hec_delay_s": 0.02,
    }
    return AuditSettings.model_validate(base | more)


def _lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _value(log: AuditLog, name: str, **labels: str) -> float:
    return log.metrics.registry.get_sample_value(name, labels) or 0.0


async def _until(check: Callable[[], object], limit_s: float = 10) -> None:
    async with asyncio.timeout(limit_s):
        while not check():
            await asyncio.sleep(0.01)


def _opened(settings: AuditSettings, process: str = "worker-1") -> AuditLog:
    log = AuditLog(settings, process, AuditMetrics())
    log.open()
    return log


def test_records_reach_file_and_collector(tmp_path: Path) -> None:
    """All of them, in order, and those of the last moment too."""

    async def run(collector: Collector) -> None:
        log = _opened(_settings(tmp_path, hec_url=collector.url, hec_index="main"))
        log.start()
        for number in range(500):
            log.emit({"event_id": str(number)})
            if number % 100 == 0:
                await asyncio.sleep(0.06)
        await log.close()
        log.emit({"event_id": "too late"})
        expected = [str(number) for number in range(500)]
        assert [line["event_id"] for line in _lines(tmp_path / "audit.jsonl")] == expected
        assert collector.ids == expected
        first = collector.events[0]
        assert abs(first["time"] - time.time()) < 60
        assert {name: first[name] for name in ("source", "sourcetype", "index")} == {
            "source": "lapilli",
            "sourcetype": "lapilli:audit",
            "index": "main",
        }
        assert _value(log, "lapilli_audit_records_total", sink="file") == 500
        assert _value(log, "lapilli_audit_records_total", sink="hec") == 500
        assert _value(log, "lapilli_audit_spool_bytes") == 0

    with Collector() as collector:
        asyncio.run(run(collector))


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    """Memory is bounded: what can't be kept is counted, the rest is written; a record never raises."""

    async def run() -> None:
        log = _opened(_settings(tmp_path, queue_max_bytes=2**16))
        for number in range(1000):
            log.emit({"event_id": f"{number:04d}", "filler": "x" * 80})
        log.emit({"event_id": {1, 2}})
        log.emit({"event_id": "\ud800"})
        dropped = _value(log, "lapilli_audit_dropped_total", reason="queue_full")
        assert dropped > 0
        log.start()
        await log.close()
        lines = _lines(tmp_path / "audit.jsonl")
        assert len(lines) == 1000 - dropped
        assert [line["event_id"] for line in lines] == [f"{number:04d}" for number in range(len(lines))]
        assert _value(log, "lapilli_audit_dropped_total", reason="unencodable") == 2

    asyncio.run(run())


def test_a_disk_that_fails_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records wait in memory and are written when it works again: none lost, none twice."""
    monkeypatch.setattr(audit_lane, "RETRY_S", 0.02)
    write = RotatingFile.write
    works = [False]

    def failing(self: RotatingFile, data: bytes) -> None:
        if not works[0]:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RotatingFile, "write", failing)

    async def run() -> None:
        log = _opened(_settings(tmp_path))
        log.start()
        for number in range(10):
            log.emit({"event_id": number})
        await _until(lambda: _value(log, "lapilli_audit_errors_total", sink="file") >= 2)
        log.emit({"event_id": 10})
        works[0] = True
        await _until(lambda: len(_lines(tmp_path / "audit.jsonl")) == 11)
        works[0] = False
        log.emit({"event_id": 11})
        await log.close()
        assert [line["event_id"] for line in _lines(tmp_path / "audit.jsonl")] == list(range(11))
        assert _value(log, "lapilli_audit_dropped_total", reason="shutdown") == 1

    asyncio.run(run())


def test_a_full_spool_drops_and_counts(tmp_path: Path) -> None:
    """While the collector is down the disk is bounded, too; the file has everything."""

    async def run() -> None:
        log = _opened(_settings(tmp_path, hec_url="http://127.0.0.1:1", spool_max_bytes=2**16))
        log.start()
        for number in range(2000):
            log.emit({"event_id": f"{number:04d}"})
            if number % 200 == 0:
                await asyncio.sleep(0.06)
        await log.close()
        assert len(_lines(tmp_path / "audit.jsonl")) == 2000
        spooled = b"".join(path.read_bytes() for path in sorted((tmp_path / "spool" / "worker-1").iterdir()))
        assert len(spooled) <= 2**16
        ids = [json.loads(line)["event"]["event_id"] for line in spooled.splitlines()]
        assert ids == [f"{number:04d}" for number in range(len(ids))]
        assert _value(log, "lapilli_audit_dropped_total", reason="spool_full") == 2000 - len(ids)

    asyncio.run(run())


def test_what_others_left_is_adopted(tmp_path: Path) -> None:
    """The supervisor sends the spools of processes that are gone; a living one's is its own."""

    async def run(collector: Collector) -> None:
        away = _settings(tmp_path, hec_url="http://127.0.0.1:1")
        for name in ("worker-3", "cli"):
            gone = _opened(away, name)
            gone.write_now({"event_id": name})
        alive = _opened(away, "worker-1")
        alive.start()
        alive.emit({"event_id": "worker-1"})
        log = _opened(_settings(tmp_path, hec_url=collector.url), SUPERVISOR)
        log.start()
        await _until(lambda: sorted(collector.ids) == ["cli", "worker-3"])
        await log.close()
        await alive.close()
        assert sorted(collector.ids) == ["cli", "worker-3"]

    with Collector() as collector:
        asyncio.run(run(collector))


def test_without_a_place_to_go_nothing_is_done(tmp_path: Path) -> None:
    """Neither file nor collector."""
    log = _opened(AuditSettings.model_validate({"file": None}))
    log.emit({"event_id": object()})
    assert not log.enabled
    assert _value(log, "lapilli_audit_dropped_total", reason="unencodable") == 0


def test_settings_that_can_not_work_are_one_line(tmp_path: Path) -> None:
    """Each names its setting."""
    blocked = tmp_path / "file"
    blocked.touch()
    cases = [
        ({"file": blocked / "audit.jsonl"}, "audit.file: can't write"),
        ({"hec_url": "https://c:8088", "hec_token": None}, "audit.hec_token: needed with audit.hec_url"),
        ({"hec_url": "https://c:8088", "spool_dir": blocked}, "audit.spool_dir: can't write"),
        ({"hec_url": "https://c:8088", "hec_ca_file": blocked}, "audit.hec_ca_file: no PEM"),
        ({"hec_url": "https://c:8088", "hec_ca_file": tmp_path / "no"}, "audit.hec_ca_file: no PEM"),
    ]
    for given, says in cases:
        found = problem(_settings(tmp_path, **given))
        assert found is not None
        assert found.startswith(says)
        assert "\n" not in found
    assert problem(_settings(tmp_path, hec_url="https://c:8088")) is None
    for url in ("splunk:8088", "https://", "https://user:pw@c", "ftp://c"):
        with pytest.raises(ValueError, match="hec_url"):
            _settings(tmp_path, hec_url=url)
    whole = _settings(tmp_path, hec_url="https://c:8088/services/collector/event")
    assert whole.hec_url == "https://c:8088"
    assert TOKEN not in repr(whole)


def test_the_token_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """`lapilli config` masks it, as a table and as JSON; errors do not quote it."""
    flags = ["--audit.hec_token", TOKEN]
    for command in (["config", *flags], ["config", "--json", *flags]):
        run_command(command)
    shown = capsys.readouterr()
    assert TOKEN not in shown.out
    assert "***" in shown.out
    with pytest.raises(SettingsError) as caught:
        load_settings([], {"LAPILLI_AUDIT__HEC_TOKEN": TOKEN, "LAPILLI_AUDIT__FILE_KEEP": "x"})
    assert TOKEN not in str(caught.value)


def test_what_a_record_holds() -> None:
    """Who, what, when, sizes, outcome, timings, ids; secrets in what a client chose are masked."""
    key = "lapilli_" + "k" * 43
    ctx = RequestContext(method="POST", path=f"/v1/{key}", client="10.1.2.3", client_request_id=f"a {key}")
    ctx.principal = Principal("team", "key_1", "name")
    ctx.status, ctx.model, ctx.prompt_tokens, ctx.completion_tokens = 200, "m", 5, 7
    ctx.first_token_at, ctx.last_token_at, ctx.longest_choice_tokens = (
        ctx.received_at + 1,
        ctx.received_at + 4,
        7,
    )
    record = request_record(ctx, 5.0, "worker-1")
    assert key not in json.dumps(record)
    assert {name: record[name] for name in ("tenant", "key_id", "client", "path", "client_request_id")} == {
        "tenant": "team",
        "key_id": "key_1",
        "client": "10.1.2.3",
        "path": "/v1/***",
        "client_request_id": "a ***",
    }
    assert (record["event_id"], record["event"]) == (ctx.id, "request")
    assert (record["outcome"], record["status"], record["model"]) == ("ok", 200, "m")
    assert (record["ttft_s"], record["tpot_s"], record["duration_s"]) == (1, 0.5, 5)
    assert (record["process"], record["pid"]) == ("worker-1", os.getpid())
    assert str(record["time"]).endswith("Z")
    admin = admin_record("keys.revoke", "key_1", actor="cli:root", details={"tenant": "team"})
    assert (admin["event"], admin["action"], admin["target"], admin["actor"]) == (
        *("admin", "keys.revoke", "key_1", "cli:root"),
    )


def test_changes_by_the_command_line_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who, what, to what, how it ended; never the secret; what only reads leaves nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LAPILLI_AUDIT__HEC_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("LAPILLI_AUDIT__HEC_TOKEN", TOKEN)
    assert run_command(["keys", "create", "--name", "ci"]) == 0
    assert run_command(["keys", "list"]) == 0
    assert run_command(["tenants", "create", "team"]) == 0
    assert run_command(["keys", "revoke", "key_nobody"]) == 1
    trail = tmp_path / "lapilli" / "audit"
    records = _lines(trail / "audit.jsonl")
    assert [(record["action"], record["outcome"]) for record in records] == [
        ("keys.create", "ok"),
        ("tenants.create", "ok"),
        ("keys.revoke", "failed"),
    ]
    assert str(records[0]["target"]).startswith("key_")
    assert records[1]["target"] == "team"
    assert all(str(record["actor"]).startswith("cli:") for record in records)
    assert "lapilli_" not in (trail / "audit.jsonl").read_text()
    spooled = [json.loads(line) for path in (trail / "spool" / "cli").iterdir() for line in path.open()]
    assert sorted(event["event"]["event_id"] for event in spooled) == sorted(r["event_id"] for r in records)
    blocked = tmp_path / "blocked"
    blocked.touch()
    monkeypatch.setenv("LAPILLI_AUDIT__FILE", str(blocked / "audit.jsonl"))
    assert run_command(["keys", "create"]) == 0
