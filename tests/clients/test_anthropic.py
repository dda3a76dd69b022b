"""The official client of Anthropic and the demo model."""

import json
from typing import Any

import anthropic
import pytest

from tests.clients.test_openai import FRANCE, PARIS, SCHEMA
from tests.conftest import MODEL, Server

pytestmark = pytest.mark.engine

TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(real: Server) -> anthropic.Anthropic:
    """A client with the first key (it sends X-API-Key) and no retries."""
    return anthropic.Anthropic(base_url=real.url, api_key=real.key, max_retries=0)


def _message(client: anthropic.Anthropic, **options: Any) -> Any:
    settings = {"model": MODEL, "messages": FRANCE, "max_tokens": 200, "extra_body": {"temperature": 0}}
    return client.messages.create(**(settings | options))


def test_message(client: anthropic.Anthropic) -> None:
    """Whole and streamed by the client's own helper; the tokens are those that were counted."""
    whole = _message(client)
    assert (whole.content[0].text, whole.stop_reason, whole.role) == (PARIS, "end_turn", "assistant")
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE)
    assert counted.input_tokens == whole.usage.input_tokens
    with client.messages.stream(
        model=MODEL, messages=FRANCE, max_tokens=60, extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == PARIS
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)


def test_system_stops_and_turns(client: anthropic.Anthropic) -> None:
    """A system prompt, stop sequences, content blocks, the token limit."""
    stopped = _message(client, stop_sequences=["of Fr"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("The capital ", "stop_sequence")
    assert stopped.stop_sequence == "of Fr"
    assert _message(client, max_tokens=2).stop_reason == "max_tokens"
    blocks = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    assert _message(client, messages=blocks).content[0].text == PARIS
    with_system = _message(client, system=[{"type": "text", "text": "You are a geographer."}])
    assert with_system.usage.input_tokens != _message(client).usage.input_tokens
    turns = [*FRANCE, {"role": "assistant", "content": PARIS}, {"role": "user", "content": "And of Italy?"}]
    assert _message(client, messages=turns, max_tokens=20).content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_use(client: anthropic.Anthropic, choice: Any) -> None:
    """A forced call, whole and streamed, and its result in the next turn."""
    options = {"tools": [TOOL], "tool_choice": choice | {"disable_parallel_tool_use": True}}
    whole = _message(client, **options)
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    assert (whole.stop_reason, use.name, set(use.input)) == ("tool_use", "weather", {"city", "unit"})
    with client.messages.stream(
        model=MODEL, messages=FRANCE, max_tokens=200, extra_body={"temperature": 0}, **options
    ) as stream:
        final: Any = stream.get_final_message()
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert (streamed.input, final.stop_reason) == (use.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
    turns = [*FRANCE, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert _message(client, messages=turns, tools=[TOOL], max_tokens=10).usage.input_tokens > 100


def test_cut_tool_use_is_no_error(client: anthropic.Anthropic) -> None:
    """Arguments that the token limit cuts: the message ends with max_tokens, not with a failure."""
    options = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    for limit in (5, 22, 26):
        cut = _message(client, max_tokens=limit, **options)
        assert cut.stop_reason == "max_tokens"
        assert all(block.type == "text" for block in cut.content)


def test_errors_are_the_clients_exceptions(client: anthropic.Anthropic, real: Server) -> None:
    """Statuses and types as Anthropic's own API has them, before and after a stream was asked for."""
    for stream in (False, True):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            _message(client, model="nope", stream=stream)
        body = unknown.value.body
        assert json.loads(json.dumps(body))["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError):
            _message(client, messages=[{"role": "user", "content": "word " * 20_000}], stream=stream)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=real.url, api_key="wrong", max_retries=0).messages.count_tokens(
            model=MODEL, messages=FRANCE
        )
