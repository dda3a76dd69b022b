"""What needs a model of its own: reasoning, LoRA adapters, noise forced into a form, embeddings."""

import base64
import json
import struct
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.test_openai import CLOCK, FORM, WEATHER, _streamed_calls
from tests.conftest import Server, poll

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HI: list[Any] = [{"role": "user", "content": "hi"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)


def _chat(server: Server, **options: Any) -> Any:
    settings = {"model": "tools", "messages": HI, "temperature": 0, "max_tokens": 20}
    return _client(server).chat.completions.create(**(settings | options))


def test_family_is_known_by_its_architecture(tools: Server) -> None:
    """Reasoning comes apart from content, streamed and whole, in all three protocols."""
    whole = _chat(tools).choices[0].message
    assert whole.reasoning
    assert not whole.content
    deltas = [chunk.choices[0].delta for chunk in _chat(tools, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == whole.reasoning
    assert not any(delta.content for delta in deltas)
    plain = _chat(tools, extra_body=NO_THINKING).choices[0].message
    assert plain.content
    assert not plain.reasoning
    response = _client(tools).responses.create(model="tools", input="hi", temperature=0, max_output_tokens=20)
    assert response.output[0].type == "reasoning"
    claude = anthropic.Anthropic(base_url=tools.url, api_key=tools.key, max_retries=0)
    message = claude.messages.create(model="tools", messages=HI, max_tokens=20)
    assert message.content[0].type == "thinking"


def test_adapters_are_models(tools: Server) -> None:
    """Each LoRA adapter answers under its own name, in its own way; unknown names are refused."""
    client = _client(tools)
    assert [model.id for model in client.models.list()] == ["tools", "first", "second"]
    assert client.models.retrieve("first").model_extra["parent"] == "tools"  # type: ignore[index]
    said = {}
    for name in ("tools", "first", "second"):
        answer = _chat(tools, model=name, extra_body=NO_THINKING, logprobs=True)
        assert answer.model == name
        chunks = list(_chat(tools, model=name, extra_body=NO_THINKING, stream=True))
        assert {chunk.model for chunk in chunks} == {name}
        text = answer.choices[0].message.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        said[name] = tuple(token.logprob for token in answer.choices[0].logprobs.content)
        assert client.completions.create(model=name, prompt="a", max_tokens=2).model == name
        assert client.responses.create(model=name, input="a", max_output_tokens=2).model == name
    assert len(set(said.values())) == 3
    with pytest.raises(openai.NotFoundError):
        _chat(tools, model="third")


@pytest.mark.parametrize("temperature", [0, 1])
def test_noise_is_forced_into_form(tools: Server, temperature: float) -> None:
    """Random weights, and yet: JSON of the schema, calls of the tools, in their right number."""
    options: dict[str, Any] = {
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 300,
        "extra_body": NO_THINKING,
    }
    formed = json.loads(_chat(tools, response_format=FORM, **options).choices[0].message.content)
    assert formed.keys() == {"city", "unit"}
    assert isinstance(
        json.loads(
            _chat(tools, response_format={"type": "json_object"}, **options).choices[0].message.content
        ),
        dict,
    )
    for choice in ("required", WEATHER | {"function": {"name": "weather"}}):
        calls: dict[str, Any] = {
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }
        (call,) = _chat(tools, **calls, **options).choices[0].message.tool_calls
        assert json.loads(call.function.arguments).keys() == {"city", "unit"}
        (streamed,), _ = _streamed_calls(list(_chat(tools, **calls, **options, stream=True)))
        assert (streamed["name"], json.loads(streamed["arguments"])) == (
            call.function.name,
            json.loads(call.function.arguments),
        )


def test_after_everything_the_engine_is_idle(tools: Server) -> None:
    """Nothing is left of the requests above, and a canary passes."""
    poll(tools.drained, "drained")
    assert _chat(tools, max_tokens=1).usage.completion_tokens == 1


def test_embeddings(embed: Server) -> None:
    """One and several inputs, texts and token ids, floats and base64: the same unit vectors."""
    client = _client(embed)
    one = client.embeddings.create(model="embed", input="the river").data[0].embedding
    assert sum(value * value for value in one) == pytest.approx(1, abs=1e-3)
    tokens = client.post("/../tokenize", cast_to=object, body={"prompt": "the river"})["tokens"]  # type: ignore[index]
    for inputs in (["the river", "a house"], [tokens, [5, 6]]):
        several = client.embeddings.create(model="embed", input=inputs, encoding_format="float")
        assert [item.index for item in several.data] == [0, 1]
        assert several.data[0].embedding == pytest.approx(one, abs=1e-4)
        assert several.data[1].embedding != pytest.approx(one, abs=1e-2)
        assert several.usage.prompt_tokens > len(tokens)
    with embed.client() as raw:
        body = {"input": "the river", "encoding_format": "base64"}
        packed = raw.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert struct.unpack(f"<{len(one)}f", base64.b64decode(packed)) == pytest.approx(one, abs=1e-4)


def test_bad_embeddings(embed: Server) -> None:
    """Refused with the reason; and a model of embeddings generates nothing."""
    with embed.client() as client:
        bodies = [
            {}, {"input": []}, {"input": ""}, {"input": 5}, {"input": "word " * 3000}, {"input": [[10**6]]},
            {"input": "x", "dimensions": 8}, {"input": "x", "encoding_format": "bytes"},
        ]  # fmt: skip
        for body in bodies:
            refused = client.post("/v1/embeddings", json=body)
            assert refused.status_code == 400, body
            assert refused.json()["error"]["message"]
        assert client.post("/v1/embeddings", json={"input": "x", "model": "nope"}).status_code == 404
        generating = {
            "/v1/chat/completions": {"messages": HI},
            "/v1/completions": {"prompt": "x"},
            "/v1/responses": {"input": "x"},
            "/v1/messages": {"model": "embed", "messages": HI, "max_tokens": 5},
        }
        for path, body in generating.items():
            refused = client.post(path, json=body)
            assert refused.status_code == 404
            assert "does not generate" in refused.json()["error"]["message"]
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
    poll(embed.drained, "drained")
    assert embed.metric("lapilli_prompt_tokens_total") > 0
