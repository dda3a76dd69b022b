"""Start, health, bad settings, many streams."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests import sse
from tests.conftest import MODEL, ROOT, Server, children, free_port, poll, running

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 20_000, "ignore_eos": True}


def test_health_from_start_to_readiness(tmp_path: Path) -> None:
    """Not ready and saying so while the engine starts, on both ports; then ready."""
    with running(tmp_path, "--engine", "stub", "--stub.start_delay_s", "3", wait=False) as server:
        poll(lambda: children(server.process.pid, "stub-engine-core"), "engine starts", 120)
        [core] = children(server.process.pid, "stub-engine-core")
        os.kill(core, signal.SIGSTOP)  # it stays in its start for as long as this test looks at it
        poll(lambda: server.health() == 503, "port open while the engine starts", 120)
        for url in (server.url, server.admin_url):
            starting = httpx.get(f"{url}/health", timeout=30).json()
            assert (starting["ready"], starting["engine"]["kind"]) == (False, "stub")
            assert starting["engine"]["state"] in ("starting", "checking")
            assert httpx.get(f"{url}/livez", timeout=30).status_code == 200
            assert httpx.get(f"{url}/readyz", timeout=30).status_code == 503
        early = server.client().post(CHAT, json=LONG)
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        os.kill(core, signal.SIGCONT)
        server.wait_ready()
        body = httpx.get(f"{server.url}/health", timeout=30).json()
        assert (body["ready"], body["model"], body["reason"]) == (True, MODEL, None)
        assert body["engine"] == {"kind": "stub", "state": "ready"}
        assert server.whole_health()["workers"] == {"serving": 1, "of": 1}


def test_keep_alive_before_a_slow_first_token(tmp_path: Path) -> None:
    """Case O11: idle bytes are comment lines only; SDKs skip them."""
    with running(
        tmp_path, "--engine", "stub", "--stub.ttft_ms", "1500", "--gateway.sse_ping_s", "0.3"
    ) as server:
        body = LONG | {"max_tokens": 3, "stream": True}
        with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
            lines = list(answer.iter_lines())
        assert sum(line.startswith(":") for line in lines) >= 2
        _, done = sse.read(lines)
        assert done


def _fails(tmp_path: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "server", "serve", *flags]
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def _model(tmp_path: Path, **files: str) -> str:
    for name, text in files.items():
        (tmp_path / name.replace("_json", ".json")).write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gateway.prot", "1"), "did you mean"),
        (("--port", "99999"), "99999"),
        (("--workers", "2"), "limits.store: memory counts in one worker alone"),
        (("--limits.redis_url", "http://x"), "not a Redis URL"),
        (("--limits.shadow", "tokens_per_min,tokens"), "limits.shadow"),
        (("--model", "/no/such/folder"), "neither a folder nor a hub name"),
        (("--model", "EMPTY"), "config.json is missing"),
        (("--model", "BROKEN"), "not a readable JSON object"),
        (("--model", "BARE"), "holds no tokenizer"),
        (("--port", "TAKEN"), "can't listen"),
        (("--gateway.tls_cert_file", "/no/such.pem"), "gateway.tls_cert_file: can't read /no/such.pem"),
        (("--engine", "stub", "--engine.args", '{"max_num_seq": 1}'), "did you mean 'max_num_seqs'?"),
        (("--engine", "stub", "--engine.args", '{"block_size": "x"}'), "vLLM refuses these settings"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    """One line that says what is wrong, exit code 2, no traceback."""
    folders = {
        "EMPTY": lambda: _model(tmp_path),
        "BROKEN": lambda: _model(tmp_path, config_json="{"),
        "BARE": lambda: _model(tmp_path, config_json="{}"),
    }
    port = free_port()
    taken = None
    if "TAKEN" in flags:
        import socket

        taken = socket.create_server(("127.0.0.1", port))
    given = [str(port) if flag == "TAKEN" else folders.get(flag, lambda f=flag: f)() for flag in flags]
    if "--port" not in flags:
        given += ["--port", "0"]
    given += ["--admin.port", "0"]
    code, line = _fails(tmp_path / "state", *given)
    if taken:
        taken.close()
    assert code == 2
    assert line.startswith("lapilli: error: ")
    assert says in line


def test_many_streams_at_once(stub: Server) -> None:
    """64 streams side by side all end, each with its own text."""
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 32, "stream": True}
    texts: dict[int, str] = {}

    def one(number: int) -> None:
        mine = body | {"messages": [{"role": "user", "content": f"stream {number % 4}"}]}
        with stub.client() as client, client.stream("POST", CHAT, json=mine) as answer:
            events, done = sse.read(answer.iter_lines())
        texts[number] = sse.text_of(events) if done else "cut"

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 64
    assert len(set(texts.values())) == 4
    poll(stub.drained, "drained")


def test_a_start_warns_of_nothing(stub: Server) -> None:
    """No process says on its way up that something is odd."""
    assert "py.warnings" not in stub.text
