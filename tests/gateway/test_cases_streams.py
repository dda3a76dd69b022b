"""Cases O8, O10 and O11 of the fault list: what a stream holds, and in which order."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from server.config import Settings
from server.context import RequestContext
from server.streaming import stream_response
from server.worker import http_config
from tests import sse
from tests.conftest import MODEL, Server, free_port, poll

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi there"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, lean path": (CHAT, {"messages": HI}),
    "chat, vLLM's path": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1}),
    "chat, two choices": (CHAT, {"messages": HI, "n": 2}),
    "text": (TEXT, {"prompt": "hi there"}),
    "texts": (TEXT, {"prompt": ["hi there", "old stone houses"], "n": 2}),
}


def _stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """A stream's events, read strictly: only data lines, comments and blank ones, one [DONE], last."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        events, done = sse.read(answer.iter_lines())
    assert done
    return events


def _texts(choices: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, from a whole answer or joined from deltas."""
    texts: dict[int, str] = {}
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or "")
    return texts


@pytest.mark.parametrize("kind", BODIES)
def test_stream_contract(stub: Server, kind: str) -> None:
    """Role first, then deltas, one finish reason a choice; the joined deltas are the whole answer's text."""
    path, body = BODIES[kind]
    with stub.client() as client:
        for change in ({"max_tokens": 7}, {"stop": ["water", "r"], "max_tokens": 30}, {}):
            whole = client.post(path, json=body | change).json()
            events = _stream(client, path, body | change)
            choices = [choice for event in events for choice in event["choices"]]
            assert _texts(choices) == _texts(whole["choices"])
            assert {event["id"] for event in events} == {events[0]["id"]}
            for expected in whole["choices"]:
                mine = [choice for choice in choices if choice["index"] == expected["index"]]
                reasons = [choice["finish_reason"] for choice in mine]
                assert reasons == [None] * (len(mine) - 1) + [expected["finish_reason"]]
                if path == CHAT:
                    assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                    assert not any(choice["delta"].get("role") for choice in mine[1:])


@pytest.mark.parametrize("kind", BODIES)
def test_o8_usage_in_streams(stub: Server, kind: str) -> None:
    """Only where it was asked for: one chunk without choices, the last before [DONE], over all choices."""
    path, body = BODIES[kind]
    body = body | {"max_tokens": 6}
    with stub.client() as client:
        whole = client.post(path, json=body).json()["usage"]
        for options in (..., None, {}, {"include_usage": False}, {"include_usage": True}):
            change = {} if options is ... else {"stream_options": options}
            events = _stream(client, path, body | change)
            with_usage = [event for event in events if event.get("usage")]
            if options != {"include_usage": True}:
                assert not with_usage
                assert all(event["choices"] for event in events)
                continue
            assert with_usage == [events[-1]]
            assert events[-1]["choices"] == []
            for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert events[-1]["usage"][field] == whole[field]
        for options in ({}, {"include_usage": True}):
            refused = client.post(path, json=body | {"stream_options": options})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "stream_options"
        assert client.post(path, json=body | {"stream_options": None}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_o10_over_the_context(stub: Server, path: str) -> None:
    """400 in JSON, streamed or not, in the same words, with the limit and the size, before any work."""
    limit = 32768

    def prompt(count: int) -> dict[str, Any]:
        text = " the" * count
        return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}

    with stub.client() as client:
        template = client.post(path, json=prompt(1) | {"max_tokens": 1}).json()["usage"]["prompt_tokens"] - 1
        room = limit - template
        bodies = {
            "prompt": prompt(room + 1) | {"max_tokens": 1},
        }
        assert client.post(path, json=prompt(9) | {"max_tokens": room - 9}).status_code == 200
        for name, body in bodies.items():
            messages = set()
            for stream in (False, True):
                refused = client.post(path, json=body | {"stream": stream}, timeout=10)
                assert refused.status_code == 400, name
                assert refused.headers["content-type"] == "application/json"
                error = refused.json()["error"]
                assert error["code"] == "context_length_exceeded", error
                assert str(limit) in error["message"]
                assert "-" not in error["message"]
                messages.add(error["message"])
            assert len(messages) == 1
    poll(stub.drained, "drained")


def _chunk(**choice: Any) -> bytes:
    whole = {"index": 0, "finish_reason": None, "delta": {}} | choice
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(chunk | {"choices": [whole]}).encode() + b"\n\n"


async def _slow_events() -> AsyncGenerator[bytes, None]:
    """An answer with silences of several pings: before the first token, and between two."""
    silences_s = (1.0, 0.0, 0.5)
    deltas = ({"role": "assistant", "content": ""}, {"content": "one "}, {"content": "two"})
    for silence_s, delta in zip(silences_s, deltas, strict=True):
        await asyncio.sleep(silence_s)
        yield _chunk(delta=delta)
    yield _chunk(finish_reason="stop") + b"data: [DONE]\n\n"


@contextmanager
def _slow_server() -> Iterator[str]:
    """Our streaming and our connection over a socket, with a generator in the engine's place."""
    app, port = FastAPI(), free_port()

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        await request.body()
        return await stream_response(request, RequestContext("POST", CHAT), _slow_events(), ping_s=0.1)

    config = http_config(app, Settings())
    config.port = port
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        poll(lambda: server.started, "listening")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_o11_keep_alive() -> None:
    """Silence brings comment lines and nothing else; the official client reads the stream through them."""
    with _slow_server() as url:
        raw = httpx.post(url + CHAT, json={}, timeout=20).content
        assert b"\r" not in raw, "clients that split at empty lines would find none"
        lines = raw.decode().split("\n")
        data = [line for line in lines if line and not line.startswith(":")]
        comments = [number for number, line in enumerate(lines) if line.startswith(":")]
        assert all(line.startswith("data: ") for line in data)
        assert data[-1] == "data: [DONE]"
        assert data.count("data: [DONE]") == 1
        assert [json.loads(line.removeprefix("data: ")) for line in data[:-1]]
        assert comments[0] == 0, "the first one comes before the first token"
        assert len(comments) >= 4
        assert all(lines[number + 1] == "" for number in comments), "a comment never runs into a data line"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        parts = client.chat.completions.create(model=MODEL, messages=HI, stream=True)  # type: ignore[call-overload]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two"
