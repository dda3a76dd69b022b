"""Cases O3, O9, O10 and O22 of the fault list over the real engine."""

from typing import Any

import httpx
import pytest

from tests import sse
from tests.conftest import Server, poll

pytestmark = pytest.mark.engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FORCED = "🦀👨\u200d👩\u200d👧 ไทย 𠮷é"
"""Four-byte and joined emoji, a script of combining marks, a rare sign: no token holds one whole."""
FRANCE = [{"role": "user", "content": "Name the capital of France in one sentence."}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lean path": (CHAT, {"messages": FRANCE}),
    "vLLM's path": (CHAT, {"messages": FRANCE, "logprobs": True}),
    "text": (TEXT, {"prompt": "Say:"}),
}


def _whole(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    page = sse.strict_loads(answer.text)
    choice = page["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return text, choice["finish_reason"], page["usage"]["completion_tokens"]


def _streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body | more) as answer:
        assert answer.status_code == 200
        raw = b"".join(answer.iter_raw())
    events, done = sse.read(raw.decode().split("\n"))  # strict: bytes cut within a character would raise
    assert done
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice["delta"].get("content") if path == CHAT else choice["text"] for choice in choices]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    return "".join(part or "" for part in parts), reasons[0], events[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("kind", BODIES)
def test_o9_characters_split_over_tokens(real: Server, kind: str) -> None:
    """Joined deltas equal the whole answer, also where max_tokens or a stop string cuts a character."""
    path, body = BODIES[kind]
    body = body | {"temperature": 0, "structured_outputs": {"choice": [FORCED]}, "max_tokens": 100}
    with real.client() as client:
        whole = _whole(client, path, body)
        assert whole[0] == FORCED
        assert whole[2] > len(FORCED), "no character is split, so this would show nothing"
        assert _streamed(client, path, body) == whole
        for change in ({"max_tokens": 2}, {"max_tokens": 7}, {"stop": ["👧"]}, {"stop": ["ย 𠮷"]}):
            cut = _whole(client, path, body | change)
            assert _streamed(client, path, body | change) == cut, change
            assert FORCED.startswith(cut[0].rstrip("\ufffd"))
            assert cut[1] == ("stop" if "stop" in change else "length")


def test_o10_over_the_real_context(real: Server) -> None:
    """A prompt one token too long is 400 before any stream byte, named with limit and size."""
    with real.client() as client:
        body = {"messages": [{"role": "user", "content": "x" + " a" * 9000}]}
        for stream in (False, True):
            refused = client.post(CHAT, json=body | {"stream": stream}, timeout=10)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "8192" in error["message"]
            assert "-" not in error["message"]
        for path, prompt in ((CHAT, {"messages": FRANCE}), (TEXT, {"prompt": "Say:"})):
            fits = client.post(path, json=prompt | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
            for stream in (False, True):
                more = {"max_tokens": 8193 - fits, "stream": stream}
                refused = client.post(path, json=prompt | more, timeout=10)
                assert refused.status_code == 400
                assert refused.headers["content-type"] == "application/json"
                assert refused.json()["error"]["code"] == "context_length_exceeded"
                assert f"8193 tokens ({fits} in the prompt" in refused.json()["error"]["message"]
            cut = prompt | {"max_tokens": 8192 - fits, "stop": [" ", "e"]}
            assert client.post(path, json=cut).json()["choices"][0]["finish_reason"] == "stop"
    poll(real.drained, "drained")


def test_o3_echo_with_logprobs(real: Server) -> None:
    """The prompt's own log-probabilities are finite and come with the answer, and without one."""
    body = {"prompt": "The capital of France", "echo": True, "logprobs": 2, "temperature": 0}
    with real.client() as client:
        found = {}
        for number in (0, 3):
            for stream in (False, True):
                answer = client.post(TEXT, json=body | {"max_tokens": number, "stream": stream})
                assert answer.status_code == 200, answer.text
                events = sse.read(answer.text.split("\n"))[0] if stream else [sse.strict_loads(answer.text)]
                parts = [choice for event in events for choice in event["choices"]]
                values = [
                    value
                    for part in parts
                    if part["logprobs"]
                    for value in part["logprobs"]["token_logprobs"]
                ]
                assert values[0] is None
                assert all(value <= 0 for value in values[1:])
                found[number, stream] = "".join(part["text"] for part in parts), values
        assert found[0, False][0] == body["prompt"]
        assert found[3, False][0].startswith(str(body["prompt"]))
        for number in (0, 3):
            assert found[number, True][0] == found[number, False][0]
            assert found[number, True][1][1:] == pytest.approx(found[number, False][1][1:], abs=1e-3)
        alone = client.post(TEXT, json=body | {"prompt": [5], "max_tokens": 1})  # of one token: no values
        assert alone.status_code == 200, alone.text
        assert len(alone.json()["choices"][0]["logprobs"]["token_logprobs"]) == 2
    poll(real.drained, "drained")


def test_o22_the_same_request_id_at_once(real: Server) -> None:
    """It is for tracing only: closing one stream leaves the other, and a third may use it at once."""
    body = {"messages": FRANCE, "max_tokens": 60, "ignore_eos": True, "stream": True, "request_id": "same"}
    ids = set()
    with (
        real.client(**{"X-Request-Id": "same"}) as client,
        client.stream("POST", CHAT, json=body | {"max_tokens": 2000}) as first,
        client.stream("POST", CHAT, json=body) as second,
    ):
        started, running = first.iter_lines(), second.iter_lines()
        ids |= {sse.read([next(lines)])[0][0]["id"] for lines in (started, running)}
        first.close()
        with client.stream("POST", CHAT, json=body) as third:
            for answer, lines in ((third, third.iter_lines()), (second, running)):
                assert answer.headers["x-request-id"] == "same"
                events, done = sse.read(lines)
                assert done
                assert events[-1]["choices"][0]["finish_reason"] == "length"
                ids.add(events[-1]["id"])
    assert len(ids) == 3
    assert not any("same" in found for found in ids)
    poll(real.drained, "drained")
