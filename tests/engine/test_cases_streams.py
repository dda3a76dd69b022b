"""Cases O9 and O10 of the fault list over the real engine."""

from typing import Any

import httpx
import pytest

from tests import sse
from tests.conftest import Server

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
        assert client.post(CHAT, json={"messages": FRANCE, "max_tokens": 1}).status_code == 200
