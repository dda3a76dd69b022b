"""The real engine with the demo model: right answers, right numbers, nothing left behind."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import httpx
import openai
import pytest

from server.engine.selfcheck import DEMO_GOLDEN
from tests import sse
from tests.batches import client_of, ended, line, lines_of, start
from tests.conftest import MODEL, ROOT, Server, children, poll, running

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
FRANCE = [{"role": "user", "content": "Name the capital of France in one sentence."}]


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)


def test_golden_answers(real: Server) -> None:
    """Greedy answers over HTTP equal those of transformers in float32."""
    with real.client() as client:
        for prompt in json.loads(DEMO_GOLDEN.read_text())["prompts"]:
            body = {"model": MODEL, "messages": prompt["messages"], "temperature": 0}
            answer = client.post(CHAT, json=body).json()
            assert answer["choices"][0]["message"]["content"] == prompt["greedy_text"]
            assert answer["usage"]["prompt_tokens"] == len(prompt["prompt_token_ids"])


def test_a_batch_is_answered_as_requests_are(real: Server) -> None:
    """Through the engine's scheduler at the priority of batches, with the right answers."""
    client = client_of(real)
    prompts = json.loads(DEMO_GOLDEN.read_text())["prompts"][:3]
    lines = [
        line(f"p{at}", max_tokens=200, messages=prompt["messages"], temperature=0)
        for at, prompt in enumerate(prompts)
    ]
    batch = ended(client, start(client, lines).id, "completed", "failed", limit_s=60)
    found = [
        answer["response"]["body"]["choices"][0]["message"]["content"]
        for answer in lines_of(client, batch.output_file_id)
    ]
    assert found == [prompt["greedy_text"] for prompt in prompts]


def test_self_check_ran(real: Server) -> None:
    """The server compared its numbers with the golden file before it became ready."""
    (line,) = [json.loads(line) for line in real.text.splitlines() if '"self_check_passed"' in line]
    assert line["golden"] == DEMO_GOLDEN.name
    assert 0 <= line["max_mean_difference_nat"] <= 0.02
    assert line["dtype"] == "float32"


def test_openai_client_whole_and_streamed(real: Server) -> None:
    """The official client gets the same text both ways."""
    client = _client(real)
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    parts = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert (
        "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage == whole.usage
    text = client.completions.create(model=MODEL, prompt="1 2 3 4", max_tokens=4, temperature=0)
    assert text.choices[0].text


def test_ttft_and_tpot_count_the_requests(real: Server) -> None:
    """Each request adds one to both histograms, and the engine's own phases come with it."""
    names = [
        f"lapilli_{name}_seconds_count"
        for name in ("time_to_first_token", "time_per_output_token", "request_queue", "request_prefill",
                     "request_decode", "request_duration")
    ]  # fmt: skip
    before = [real.metric(name) for name in names]
    tokens = real.metric("lapilli_completion_tokens_total")
    with real.client() as client:
        for stream in (True, False, True):
            body = {"messages": FRANCE, "max_tokens": 5, "temperature": 0, "stream": stream}
            assert client.post(CHAT, json=body).status_code == 200
    assert [real.metric(name) for name in names] == [count + 3 for count in before]
    assert real.metric("lapilli_completion_tokens_total") == tokens + 15


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_request(real: Server, stream: bool) -> None:
    """A client that leaves costs the engine no more steps."""
    body = {"messages": FRANCE, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with real.client() as client:
        if stream:
            with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=1)
    poll(real.drained, "request gone from gateway and engine")


def test_prompt_over_the_context(real: Server) -> None:
    """400 before any stream byte, and the canary after it passes."""
    body = {"messages": [{"role": "user", "content": "word " * 20_000}], "stream": True}
    with real.client() as client:
        refused = client.post(CHAT, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert client.post(CHAT, json={"messages": FRANCE, "max_tokens": 1}).status_code == 200


def test_readme_curl_prints_paris(real: Server) -> None:
    """The README's first request, as written there but for the address."""
    import subprocess

    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", readme, re.DOTALL)
    (command,) = [block for block in blocks if "capital of France" in block and "curl" in block]
    command = command.replace("http://127.0.0.1:8000", real.url).replace("http://localhost:8000", real.url)
    env = os.environ | {"LAPILLI_API_KEY": real.key}
    done = subprocess.run(["bash", "-ec", command], env=env, capture_output=True, text=True, timeout=60)
    assert "The capital of France is Paris." in done.stdout, done.stderr


@pytest.mark.slow
def test_wrong_numbers_keep_the_server_not_ready(tmp_path: Path) -> None:
    """A golden file that the engine does not match: 503, and /health says what differs."""
    golden = json.loads(DEMO_GOLDEN.read_text())
    logprobs = golden["prompts"][1]["token_logprobs"]
    golden["prompts"][1]["token_logprobs"] = [value - 0.03 for value in logprobs]
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(golden))
    with running(tmp_path / "state", "--selfcheck.golden", str(wrong), wait=False) as server:
        poll(lambda: "not_ready" in server.text, "the self-check's verdict", 240)
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 503
        assert "log-probabilities" in answer.json()["reason"]
        assert "0.0300 nat" in answer.json()["reason"]
        assert server.client().post(CHAT, json={"messages": FRANCE}).status_code == 503
        assert server.process.poll() is None


@pytest.mark.slow
def test_kv_exhaustion_and_kill_of_the_engine(tmp_path: Path) -> None:
    """With room for a fraction of the KV blocks all requests end; then kill -9 of the engine core."""
    flags = ("--selfcheck.enabled", "false", "--max-model-len", "512", "--engine.max_restarts", "0")
    with running(tmp_path, *flags, "--engine.args", '{"num_gpu_blocks_override": 6}') as server:
        _exhaust_kv_blocks(server)
        _kill_the_engine(server)


def _exhaust_kv_blocks(server: Server) -> None:
    """Preempted requests are taken up again: each gets all its tokens."""
    ends: list[str] = []

    def one(number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Count from {number}."}], "max_tokens": 200}
        with server.client() as client:
            answer = client.post(CHAT, json=body | {"ignore_eos": True}, timeout=240)
        ends.append(answer.json()["choices"][0]["finish_reason"])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == ["length"] * 8
    assert server.metric("vllm:num_preemptions_total") > 0
    poll(server.drained, "drained")


def _kill_the_engine(server: Server) -> None:
    """An open stream ends with an error event; with no restart allowed the server ends with exit code 1."""
    body = {"messages": FRANCE, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        (core,) = children(server.process.pid, "EngineCore")
        os.kill(core, signal.SIGKILL)
        events, done = sse.read(lines)
    assert not done
    assert events[-1]["error"]["code"] == "service_unavailable"
    assert server.process.wait(60) == 1
