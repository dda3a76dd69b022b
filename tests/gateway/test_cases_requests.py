"""Cases O4, O6, O8 and O31 that need no real model: shapes, tools, options of streams, URLs."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import MODEL, Server, poll

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
NAMED = {"type": "function", "function": {"name": "other"}}


def _refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = dict(answer.json()["error"])
    assert error["message"]
    assert error["param"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_o4_messages(stub: Server, stream: bool) -> None:
    """What is no message is refused, as plain JSON even where a stream was asked for."""
    bad: list[Any] = [
        [], None, ..., [{"role": "user", "content": []}], [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "hologram", "hologram": "x"}]}],
    ]  # fmt: skip
    with stub.client() as client:
        for messages in bad:
            body = {name: value for name, value in (HI | {"messages": messages}).items() if value is not ...}
            assert str(_refused(client.post(CHAT, json=body | {"stream": stream}))["param"]).startswith(
                "messages"
            )


@pytest.mark.parametrize("stream", [False, True])
def test_o6_tool_choice(stub: Server, stream: bool) -> None:
    """A choice that can not be met is refused before a stream; none and auto without tools are nothing."""
    bad: list[dict[str, Any]] = [
        {"tool_choice": "maybe", "tools": TOOLS}, {"tool_choice": {}, "tools": TOOLS},
        {"tool_choice": NAMED, "tools": TOOLS}, {"tool_choice": "required", "tools": []},
        {"tool_choice": "required"},
    ]  # fmt: skip
    with stub.client() as client:
        for fields in bad:
            _refused(client.post(CHAT, json=HI | fields | {"stream": stream}))
        for choice in ("none", "auto"):
            for tools in ({}, {"tools": []}):
                answer = client.post(CHAT, json=HI | tools | {"tool_choice": choice, "stream": stream})
                assert answer.status_code == 200, answer.text


def test_o8_stream_options_without_a_stream(stub: Server) -> None:
    """OpenAI's rule; null is unset."""
    with stub.client() as client:
        for options in ({}, {"include_usage": True}, {"include_usage": False}):
            assert (
                _refused(client.post(CHAT, json=HI | {"stream_options": options}))["param"]
                == "stream_options"
            )
        assert client.post(CHAT, json=HI | {"stream_options": None}).status_code == 200
        for options in (None, {}, {"include_usage": None}):
            assert client.post(CHAT, json=HI | {"stream": True, "stream_options": options}).status_code == 200


@pytest.fixture
def listener() -> Iterator[tuple[int, list[Any]]]:
    """A port on all addresses, and who came to it."""
    with socket.create_server(("", 0)) as server:
        came: list[Any] = []

        def accept() -> None:
            while True:
                try:
                    came.append(server.accept()[1])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], came


def test_o31_no_url_is_fetched(stub: Server, listener: tuple[int, list[Any]]) -> None:
    """A model that takes text alone refuses every media part, on every endpoint, and asks no host."""
    port, came = listener
    hosts = ("127.0.0.1", "[::1]", "0.0.0.0", "2130706433", "localhost")
    urls = [f"http://{host}:{port}/x.png" for host in hosts]
    urls += ["file:///etc/passwd", "data:image/png;base64," + "A" * 200_000, "data:text/plain;base64,aGk="]
    with stub.client() as client:
        for url in urls:
            image = {"type": "image_url", "image_url": {"url": url}}
            error = _refused(
                client.post(CHAT, json=HI | {"messages": [{"role": "user", "content": [image]}]})
            )
            assert error["param"] == "messages[0].content[0].type"
            source = {"type": "image", "source": {"type": "url", "url": url}}
            body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [source]}]}
            assert client.post("/v1/messages", json=body).status_code == 400
            part = {"type": "input_image", "image_url": url}
            items = [{"role": "user", "content": [part]}]
            assert client.post("/v1/responses", json={"model": MODEL, "input": items}).status_code == 400
    assert came == []


def test_grammars_over_the_stub(stub: Server) -> None:
    """Bad forms are refused whatever the engine is, and good ones taken."""
    bad = {"structured_outputs": {"regex": "(a"}}
    with stub.client() as client:
        error = _refused(client.post(CHAT, json=HI | bad))
        assert (error["param"], error["code"]) == ("structured_outputs", "invalid_grammar")
        for stream in (False, True):
            form = {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            }
            assert client.post(CHAT, json=HI | form | {"stream": stream}).status_code == 200
    poll(stub.drained, "requests gone")
