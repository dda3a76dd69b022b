"""The endpoints besides chat and text completions, over the stub."""

import time
from typing import Any

import httpx
import pytest

from tests import sse
from tests.conftest import MODEL, Server, poll

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
INPUT: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 5}
JSON = {"Content-Type": "application/json"}
LONG = INPUT | {"max_output_tokens": 20_000, "ignore_eos": True}


def test_models(stub: Server) -> None:
    """One model by its name, 404 for others, and nothing of this machine's folders."""
    with stub.client() as client:
        (listed,) = client.get("/v1/models").json()["data"]
        assert client.get(f"/v1/models/{MODEL}").json()["id"] == listed["id"] == listed["root"] == MODEL
        for name in ("nope", "owner/nope"):
            refused = client.get(f"/v1/models/{name}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_back(stub: Server) -> None:
    """The ids of a text make the text again; messages are rendered as for a chat."""
    with stub.client() as client:
        tokens = client.post("/tokenize", json={"prompt": "the river é🦀"}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {
            "prompt": "the river é🦀"
        }
        rendered = client.post(
            "/tokenize", json={"messages": HI["messages"], "return_token_strs": True}
        ).json()
        assert rendered["token_strs"][0] == "<|im_start|>"
        chat = client.post("/v1/chat/completions", json=HI).json()
        assert chat["usage"]["prompt_tokens"] == rendered["count"]
        for body in ({"tokens": [-1]}, {"tokens": [10**6]}, {"tokens": [2**70]}, {"tokens": "x"}, {}):
            assert client.post("/detokenize", json=body).status_code == 400
        for body in ({}, {"prompt": 5}, {"messages": ["x"]}, {"messages": [], "prompt": "x"}):
            assert client.post("/tokenize", json=body).status_code == 400
        assert client.post("/tokenize", json={"prompt": "x", "model": "nope"}).status_code == 404


def _events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Named SSE events: every data line is JSON, every event has a name."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), sse.strict_loads(data.removeprefix("data: "))))
    return found


def test_message_whole_and_streamed(stub: Server) -> None:
    """Anthropic's shape, and the stream says what the whole answer says; both are counted."""
    counted = stub.metric("lapilli_completion_tokens_total")
    with stub.client() as client:
        whole = client.post(MESSAGES, json=HI).json()
        events = _events(client.post(MESSAGES, json=HI | {"stream": True}).text)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["stop_reason"], whole["usage"]["output_tokens"]) == (
        "message",
        "max_tokens",
        5,
    )
    assert [name for name, _ in events if name != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert events[0][1]["message"]["id"].startswith("msg_")
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"] != ""
    assert stub.metric("lapilli_completion_tokens_total") == counted + 10


def test_count_tokens_is_what_the_message_uses(stub: Server) -> None:
    """count_tokens generates nothing and tells the input tokens."""
    body = {name: HI[name] for name in ("model", "messages")}
    with stub.client() as client:
        counted = client.post(f"{MESSAGES}/count_tokens", json=body).json()["input_tokens"]
        assert counted == client.post(MESSAGES, json=HI).json()["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_message_errors_are_anthropics(stub: Server, stream: bool) -> None:
    """Every refusal on Anthropic's routes has Anthropic's shape, before any stream byte."""
    cases = {
        "not_found_error": (404, {"model": "nope"}),
        "invalid_request_error": (400, {"max_tokens": 0}),
    }
    with stub.client() as client:
        for kind, (status, change) in cases.items():
            refused = client.post(MESSAGES, json=HI | change | {"stream": stream})
            assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
            assert refused.json()["type"] == "error"
        for change in ({"temperature": -1}, {"messages": []}, {"messages": "x"}, {"top_p": 7}, {"system": 5}):
            assert client.post(MESSAGES, json=HI | change | {"stream": stream}).status_code == 400
        broken = client.post(MESSAGES, content=b"{", headers=JSON)
        assert broken.json()["error"]["type"] == "invalid_request_error"
        large = client.post(MESSAGES, content=b" " * (2**20 + 1), headers=JSON)
        assert large.json()["error"]["type"] == "request_too_large"
        assert client.get(MESSAGES).json()["type"] == "error"
    no_key = httpx.post(stub.url + MESSAGES, json=HI)
    assert (no_key.status_code, no_key.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.post(stub.url + MESSAGES, json=HI, headers={"X-API-Key": stub.key}).status_code == 200


def test_response_whole_and_streamed(stub: Server) -> None:
    """Events are numbered without a gap and end in the whole response."""
    with stub.client() as client:
        whole = client.post(RESPONSES, json=INPUT).json()
        events = _events(client.post(RESPONSES, json=INPUT | {"stream": True}).text)
        natural = client.post(RESPONSES, json={"input": "hi"}).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert natural["status"] == "completed"
    assert whole["usage"]["output_tokens"] == 5
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1][0] == events[-1][1]["type"] == "response.incomplete"
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(d["delta"] for name, d in events if name == "response.output_text.delta") == text != ""
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_bad_responses_requests(stub: Server, stream: bool) -> None:
    """Refused as JSON, whether the stream was asked for or not."""
    changes = [
        {"temperature": -1}, {"max_output_tokens": 0}, {"max_output_tokens": "5"}, {"input": None},
        {"input": 5}, {"input": [{"role": "wizard", "content": "x"}]}, {"prompt": {"id": "x"}},
        {"tool_choice": "required"},
        {"background": True, "store": False}, {"input": "word " * 40_000},
    ]  # fmt: skip
    with stub.client() as client:
        for change in changes:
            refused = client.post(RESPONSES, json=INPUT | change | {"stream": stream})
            assert refused.status_code == 400, (change, refused.text)
            assert refused.json()["error"]["message"]
        for change in ({"model": "nope"}, {"previous_response_id": "resp_nope"}):
            assert client.post(RESPONSES, json=INPUT | change | {"stream": stream}).status_code == 404


def test_stored_response_is_its_callers_own(stub: Server) -> None:
    """Retrieved, continued and deleted by the key that made it; 404 for another key."""
    other = next(word for word in stub.cli("keys", "create", "--name", "other").split() if "lapilli_" in word)
    with stub.client() as client:
        made = client.post(RESPONSES, json=INPUT).json()
        unstored = client.post(RESPONSES, json=INPUT | {"store": False}).json()
        path = f"{RESPONSES}/{made['id']}"
        assert client.get(path).json() == made
        assert client.get(f"{RESPONSES}/{unstored['id']}").status_code == 404
        following = INPUT | {"previous_response_id": made["id"]}
        assert (
            client.post(RESPONSES, json=following).json()["usage"]["input_tokens"]
            > made["usage"]["input_tokens"]
        )
        strange = {"Authorization": f"Bearer {other}"}
        assert client.get(path, headers=strange).status_code == 404
        assert client.post(f"{path}/cancel", headers=strange).status_code == 404
        assert client.delete(path, headers=strange).status_code == 404
        assert client.post(RESPONSES, json=following, headers=strange).status_code == 404
        assert client.post(f"{path}/cancel").status_code == 400
        assert client.get(path, params={"stream": "true"}).status_code == 400
        assert client.get(path, params={"stream": "maybe"}).status_code == 400
        assert client.delete(path).json() == {"id": made["id"], "object": "response", "deleted": True}
        assert client.get(path).status_code == 404


def test_background_response_is_cancelled(stub: Server) -> None:
    """It is in flight until it is cancelled; then the engine is free, and so is every reader."""
    with stub.client() as client:
        made = client.post(RESPONSES, json=LONG | {"background": True, "stream": False}).json()
        path = f"{RESPONSES}/{made['id']}"
        assert made["status"] == "queued"
        assert client.get(path).json()["status"] == "in_progress"
        assert stub.metric("lapilli_requests_in_flight") == 1
        assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
        assert client.get(path).json()["status"] == "cancelled"
        assert client.delete(path).status_code == 200
        following = client.post(RESPONSES, json=LONG | {"background": True}).json()["id"]
        assert client.delete(f"{RESPONSES}/{following}").status_code == 200
    poll(stub.drained, "request gone from gateway and engine")


def test_background_stream_is_read_again(stub: Server) -> None:
    """The events of a background response can be read from any number on, by any number of readers."""
    body = INPUT | {"background": True, "stream": True}
    with stub.client() as client:
        first = _events(client.post(RESPONSES, json=body).text)
        path = f"{RESPONSES}/{first[0][1]['response']['id']}"
        poll(lambda: client.get(path).json()["status"] == "incomplete", "the response is done")
        assert _events(client.get(path, params={"stream": "true"}).text) == first
        later = _events(client.get(path, params={"stream": "true", "starting_after": "3"}).text)
        assert later == first[4:]


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, LONG), (MESSAGES, HI | {"max_tokens": 20_000})])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_request(stub: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    """A client that leaves is noticed on every endpoint."""
    before = stub.metric("lapilli_completion_tokens_total")
    with stub.client() as client:
        if path == MESSAGES:
            body = body | {"messages": [{"role": "user", "content": "a long story"}]}
        if stream:
            with client.stream("POST", path, json=body | {"stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.15)
    poll(stub.drained, "request gone from gateway and engine")
    if stream:  # the tokens of a whole answer show up at its end
        poll(lambda: stub.metric("lapilli_completion_tokens_total") > before, "its tokens are counted")


def test_server_fields_are_not_the_clients(stub: Server) -> None:
    """No endpoint takes the engine's request id, priority or cache salt from a client."""
    mine = {"request_id": "mine", "priority": 5, "cache_salt": "salt", "session_id": "s"}
    xargs = {"vllm_xargs": {"session_id": "s"}, "kv_transfer_params": {"prompt_token_ids": [1]}}
    with stub.client(**{"X-Request-Id": "mine"}) as client:
        for path, body in ((RESPONSES, INPUT), (MESSAGES, HI)):
            answer = client.post(path, json=body | mine | xargs)
            assert answer.status_code == 200, answer.text
            assert "mine" not in answer.text
            assert answer.json()["usage"]["input_tokens"] > 10


def test_dangerous_routes_do_not_exist(stub: Server) -> None:
    """vLLM's routes that move weights, sleep or call into workers are nowhere."""
    names = (
        "sleep", "wake_up", "collective_rpc", "v1/load_lora_adapter", "v1/unload_lora_adapter", "pause",
        "start_profile", "update_weights", "reset_prefix_cache", "scale_elastic_ep", "invocations",
        "server_info",
    )  # fmt: skip
    with stub.client() as client:
        for name in names:
            assert client.post(f"/{name}", json={}).status_code == 404, name
            assert client.get(f"/{name}").status_code == 404, name


def test_store_is_bounded_and_fair() -> None:
    """Above the limit the caller who holds most loses the oldest; others keep theirs."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

    from server.protocol.response_store import ResponseStore

    store = ResponseStore(20_000)
    for number, owner in enumerate(["small", *["greedy"] * 40]):
        name = f"resp_{number}"
        store.open(name, owner)
        store.messages[name] = [{"role": "user", "content": "x" * 500}]
        store.responses[name] = ResponsesResponse.model_construct(id=name, created_at=int(time.time()))
        store.settle(name)
    assert store.find("resp_0", "small") is not None
    assert store.find("resp_0", "greedy") is None
    assert store.find("resp_1", "greedy") is None
    assert store.find("resp_40", "greedy") is not None
    assert set(store.messages) == set(store.responses)
    assert len(store.responses) < 40
    store.open("resp_lost", "small")
    store.messages["resp_lost"] = []
    store.settle("resp_lost")
    assert "resp_lost" not in store.messages
