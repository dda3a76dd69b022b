"""The command line, in this process and as the real command."""

import json
import re
import subprocess
import sys

import pytest

from server import __version__
from server.cli import run_command
from server.config import leaves


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """Empty working folder and state folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("LAPILLI_CONFIG", *(leaf.env_name for leaf in leaves())):
        monkeypatch.delenv(name, raising=False)


def run_json(capsys, *argv):
    assert run_command([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_config_prints_values_and_origins(capsys):
    assert (
        run_command(["config", "--port", "9", "--auth.database_url", "sqlite+aiosqlite://u:hunter2@h/d"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(list(leaves()))
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert [cell.strip() for cell in rows["gateway.port"]] == ["9", "flag --port"]
    assert rows["auth.database_url"][0] == "sqlite+aiosqlite://u:***@h/d"


def test_config_json(capsys, monkeypatch):
    monkeypatch.setenv("LAPILLI_ENGINE__ARGS", '{"seed": 1, "hf_token": "hunter2"}')
    entries = run_json(capsys, "config", "--auth.database_url=sqlite+aiosqlite://u:hunter2@h/d")
    assert entries["gateway.port"] == {"value": 8000, "origin": "default"}
    assert entries["selfcheck.golden"]["value"] is None
    assert entries["engine.args"] == {
        "value": {"seed": 1, "hf_token": "***"},
        "origin": "env LAPILLI_ENGINE__ARGS",
    }
    assert "hunter2" not in json.dumps(entries)


def test_keys_from_creation_to_revocation(capsys):
    created = run_json(capsys, "keys", "create", "--name", "[red]a")
    assert created["key"].startswith(created["prefix"])
    assert run_json(capsys, "keys", "list") == [{k: v for k, v in created.items() if k != "key"}]
    assert run_command(["keys", "list"]) == 0
    table = capsys.readouterr().out
    assert "[red]a" in table
    assert created["key"] not in table
    assert run_json(capsys, "keys", "revoke", created["id"])["revoked_at"] is not None


def test_tenants_and_their_keys(capsys):
    tenant = run_json(
        capsys, *("tenants", "create", "acme", "--class", "batch", "--weight", "2", "--cache-group", "g"),
        *("--limit", "tokens_per_min=500", "--limit", "requests_per_s=none"),
    )  # fmt: skip
    assert tenant["limits"] == {"requests_per_s": None, "tokens_per_min": 500}
    assert [t["name"] for t in run_json(capsys, "tenants", "list")] == ["acme", "default"]
    key = run_json(
        capsys, *("keys", "create", "--tenant", "acme", "--service", "chat", "--scope", "a", "--scope", "b"),
        *("--limit", "parallel_requests=2", "--expires", "2999-01-01"),
    )  # fmt: skip
    assert (key["services"], key["scopes"], key["limits"]) == (["chat"], ["a", "b"], {"parallel_requests": 2})
    assert key["expires_at"] == "2999-01-01T00:00:00.000Z"
    changed = run_json(
        capsys, "keys", "change", key["id"], "--service", "any", "--expires", "none", "--name", "n"
    )
    assert (changed["services"], changed["expires_at"], changed["name"]) == (None, None, "n")
    assert changed["scopes"] == ["a", "b"]
    rotated = run_json(capsys, "keys", "rotate", key["id"], "--overlap-s", "60")
    assert rotated["id"] == key["id"]
    assert rotated["key"] != key["key"]
    assert rotated["previous_expires_at"]
    assert run_json(capsys, "keys", "list", "--tenant", "default") == []
    assert run_json(capsys, "tenants", "change", "acme", "--cache-group", "none")["cache_group"] is None
    assert run_json(capsys, "tenants", "disable", "acme")["disabled_at"]
    for argv in (["tenants", "list"], ["keys", "list"], ["tenants", "enable", "acme"]):
        assert run_command(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"^acme +batch +2 +requests_per_s=none, tokens_per_min=500 ", out, re.MULTILINE)
    assert "Enabled tenant acme." in out
    assert run_json(capsys, "db", "upgrade") == {"before": "0003", "after": "0003"}


def test_created_key_alone_is_on_stdout(capsys):
    assert run_command(["keys", "create"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("lapilli_")
    assert len(captured.out) == len("lapilli_") + 43 + 1
    assert captured.out.strip() not in captured.err


def test_database_comes_from_file_or_flag(capsys, tmp_path):
    (tmp_path / "f.yaml").write_text(f"auth: {{database_url: 'sqlite+aiosqlite:///{tmp_path}/one.db'}}")
    other = f"--auth.database_url=sqlite+aiosqlite:///{tmp_path}/two.db"
    run_json(capsys, "keys", "create", "--config", "f.yaml")
    assert len(run_json(capsys, "keys", "list", "--config", "f.yaml")) == 1
    assert run_json(capsys, "keys", "list", "--config", "f.yaml", other) == []


FAILURES = {
    "unknown id": (
        ["keys", "revoke", "key_none"],
        1,
        "no API key has this id; `lapilli keys list` shows the ids",
    ),
    "name": (
        ["keys", "create", "--name", ""],
        2,
        "a key's name has 1 to 100 printable characters",
    ),
    "unknown tenant": (
        ["keys", "create", "--tenant", "nobody"],
        1,
        "no tenant has this name; `lapilli tenants list` shows the names",
    ),
    "tenant that exists": (["tenants", "create", "default"], 1, "a tenant of this name exists already"),
    "limit's form": (
        ["tenants", "create", "a", "--limit", "tokens_per_min"],
        2,
        "Invalid value for '--limit': write NAME=NUMBER, or NAME=none for no limit",
    ),
    "limit's bounds": (
        ["tenants", "create", "a", "--limit", "requests_per_s=1"],
        2,
        "requests_per_s must be an integer from 10 to 5000, or null for no limit",
    ),
    "class": (
        ["tenants", "create", "a", "--class", "gold"],
        2,
        "Invalid value for '--class': 'gold' is not one of 'interactive', 'standard', 'batch'.",
    ),
    "expiry": (["keys", "create", "--expires", "2001-01-01"], 2, "the expiry is in the past"),
    "issuer alone": (
        ["serve", "--jwt.issuer", "https://login.example"],
        2,
        "jwt.issuer needs jwt.audience: tokens meant for others must not be good here",
    ),
    "no id": (["keys", "revoke"], 2, "Missing argument 'ID'."),
    "setting of another command": (
        ["keys", "list", "--port", "1"],
        2,
        "unknown flag --port; did you mean --json?",
    ),
    "command": (["confg"], 2, "No such command 'confg'. Did you mean 'config'?"),
    "database": (
        ["keys", "list", "--auth.database_url", "sqlite+aiosqlite:////"],
        1,
        "key database: [Errno 21] Is a directory: '/'",
    ),
}


@pytest.mark.parametrize(("argv", "code", "message"), FAILURES.values(), ids=FAILURES)
def test_failure_is_one_line(argv, code, message, capsys):
    assert run_command(argv) == code
    assert capsys.readouterr().err == f"lapilli: error: {message}\n"


def test_a_key_given_as_id_is_not_repeated(capsys):
    secret = run_json(capsys, "keys", "create")["key"]
    assert run_command(["keys", "revoke", secret]) == 1
    assert secret not in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["keys"], ["tenants"], ["db"]])
def test_no_command_shows_help(argv, capsys):
    assert run_command(argv) == 2
    assert "Commands:" in capsys.readouterr().err


def test_serve_help_has_every_flag(capsys):
    assert run_command(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for leaf in leaves():
        assert all(f"{flag}" in text for flag in leaf.flags)
        assert leaf.description.split()[0] in text


_COMMAND = """
import sys
from server.cli import main
sys.argv[0] = "lapilli"
try:
    main()
finally:
    heavy = {"vllm", "torch", "fastapi"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["--version"], 0, f"lapilli, version {__version__}\n", ""),
        (["serve", "--prot", "1"], 2, "", "lapilli: error: unknown flag --prot; did you mean --port?\n"),
        (["keys", "revoke", "x"], 1, "", None),
        (["keys", "list", "--json"], 0, "[]\n", ""),
    ],
)
def test_real_command_exit_codes_without_the_engine(argv, code, out, err):
    """Each exit code, and that none of this imports vLLM, torch or FastAPI."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, out)
    assert "Traceback" not in done.stderr
    assert err is None or done.stderr == err
