"""Requests over the stub: answers, streams, refusals."""

import httpx
import openai
import pytest

from tests import sse
from tests.conftest import MODEL, Server, poll

HI = [{"role": "user", "content": "hi there"}]
CHAT = "/v1/chat/completions"
BAD_BODIES = {
    "no JSON": (b"{bad", 400),
    "not an object": (b"[]", 400),
    "empty": (b"", 400),
    "not UTF-8": (b'{"messages": "\xff"}', 400),
    "NaN": (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400),
}
BAD_FIELDS = {
    "messages missing": ({"messages": ...}, 400, "messages"),
    "messages null": ({"messages": None}, 400, "messages"),
    "messages empty": ({"messages": []}, 400, "messages"),
    "messages a text": ({"messages": "hi"}, 400, "messages"),
    "message no object": ({"messages": ["hi"]}, 400, "messages[0]"),
    "unknown model": ({"model": "nope"}, 404, "model"),
    "max_tokens 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -1}, 400, "max_tokens"),
    "max_tokens text": ({"max_tokens": "10"}, 400, "max_tokens"),
    "max_tokens true": ({"max_tokens": True}, 400, "max_tokens"),
    "max_tokens too large": ({"max_tokens": 10**9}, 400, "max_tokens"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    "temperature negative": ({"temperature": -1}, 400, "temperature"),
    "temperature text": ({"temperature": "x"}, 400, "temperature"),
    "prompt over the context": ({"messages": [{"role": "user", "content": "word " * 40_000}]}, 400, None),
}


def test_stream_and_whole_answer_are_the_same(stub: Server) -> None:
    """Joined deltas equal the non-stream text, and both usages agree."""
    body = {"model": MODEL, "messages": HI, "max_tokens": 20}
    with stub.client() as client:
        whole = client.post(CHAT, json=body).json()
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", CHAT, json=streamed) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events, done = sse.read(answer.iter_lines())
    assert done
    assert sse.text_of(events) == whole["choices"][0]["message"]["content"] != ""
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 20


def test_text_completion(stub: Server) -> None:
    """Several prompts, one answer each."""
    with stub.client() as client:
        answer = client.post("/v1/completions", json={"prompt": ["a b", "c d"], "max_tokens": 4})
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_openai_client(stub: Server) -> None:
    """The official client: list, whole, streamed, and its exceptions."""
    client = openai.OpenAI(base_url=f"{stub.url}/v1", api_key=stub.key, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, n=2)  # type: ignore[call-overload]
    assert len(whole.choices) == 2
    parts = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, stream=True)  # type: ignore[call-overload]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=HI)  # type: ignore[call-overload]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{stub.url}/v1", api_key="wrong", max_retries=0).models.list()


def _refused(answer: httpx.Response, status: int) -> dict[str, str | None]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in answer.text
    assert "NoneType" not in answer.text
    return dict(error)


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_body(stub: Server, name: str) -> None:
    """What is no JSON object is refused with a JSON error."""
    body, status = BAD_BODIES[name]
    with stub.client() as client:
        _refused(client.post(CHAT, content=body, headers={"Content-Type": "application/json"}), status)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_field(stub: Server, name: str, stream: bool) -> None:
    """A bad field is refused before any stream byte, in the same words whether streamed or not."""
    change, status, param = BAD_FIELDS[name]
    body = {"model": MODEL, "messages": HI, "stream": stream} | change
    body = {field: value for field, value in body.items() if value is not ...}
    with stub.client() as client:
        error = _refused(client.post(CHAT, json=body), status)
    assert error["param"] == param
    if name == "prompt over the context":
        assert error["code"] == "context_length_exceeded"
        assert "32768" in str(error["message"])


def test_max_tokens_null_is_unset(stub: Server) -> None:
    """null means absent: the stub's natural length."""
    with stub.client() as client:
        answer = client.post(CHAT, json={"messages": HI, "max_tokens": None}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_logprobs_of_the_stub(stub: Server) -> None:
    """The stub supports logprobs, so that clients which ask for them can be tried."""
    with stub.client() as client:
        body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        answer = client.post(CHAT, json=body)
    assert [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]] == [0.0, 0.0]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit(stub: Server, chunked: bool) -> None:
    """413 for a declared and for a chunked body; the canary after it passes."""
    size = 2**20 + 1
    content = (b" " * 2**16 for _ in range(size // 2**16 + 1)) if chunked else b" " * size
    with stub.client() as client:
        answer = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert client.post(CHAT, json={"messages": HI, "max_tokens": 1}).status_code == 200


def test_server_fields_are_not_the_clients(stub: Server) -> None:
    """Priority, engine request id and the like are ignored; X-Request-Id is echoed and no engine id."""
    body = {"messages": HI, "max_tokens": 1, "priority": 5, "request_id": "mine", "cache_salt": "salt"}
    with stub.client(**{"X-Request-Id": "trace-1"}) as client:
        answer = client.post(CHAT, json=body)
    assert answer.headers["x-request-id"] == "trace-1"
    assert "mine" not in answer.json()["id"]
    assert "trace-1" not in answer.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_request(stub: Server, stream: bool) -> None:
    """A client that leaves is noticed, and its request aborted in the engine."""
    body = {"messages": HI, "max_tokens": 20_000, "ignore_eos": True, "stream": stream}
    before = stub.metric("lapilli_requests_total")
    with stub.client() as client:
        if stream:
            with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.iter_lines()  # kept: httpx closes the stream with its iterator
                next(lines)
                assert stub.metric("lapilli_requests_in_flight") == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=0.3)
    poll(stub.drained, "request gone from gateway and engine")
    assert stub.metric("lapilli_requests_total") == before + 1


def test_every_request_is_counted(stub: Server) -> None:
    """TTFT and TPOT histograms grow by exactly the requests made, streamed or not."""
    names = [f"lapilli_{name}_seconds_count" for name in ("time_to_first_token", "time_per_output_token")]
    before = [stub.metric(name) for name in names]
    gaps = stub.metric("lapilli_inter_token_seconds_count")
    with stub.client() as client:
        for stream in (False, True, False, True):
            client.post(CHAT, json={"messages": HI, "max_tokens": 8, "stream": stream})
    assert [stub.metric(name) for name in names] == [count + 4 for count in before]
    assert stub.metric("lapilli_inter_token_seconds_count") >= gaps + 2


def test_unknown_routes(stub: Server) -> None:
    """404 and 405 as JSON, and no redirect for a final slash."""
    with stub.client() as client:
        assert client.get("/nope").json()["error"]["code"] == "not_found"
        assert client.get(CHAT).status_code == 405
        assert client.post(CHAT + "/", json={}).status_code == 404
