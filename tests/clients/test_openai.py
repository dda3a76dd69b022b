"""The official Python client of OpenAI and the demo model: every feature that needs no special model."""

import json
import math
from typing import Any

import openai
import pytest

from tests.conftest import MODEL, Server

pytestmark = pytest.mark.engine

FRANCE: list[Any] = [{"role": "user", "content": "Name the capital of France in one sentence."}]
PARIS = "The capital of France is Paris."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA, "strict": True}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(real: Server) -> openai.OpenAI:
    """A client with the first key and no retries."""
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key=real.key, max_retries=0)


def _chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **({"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 60} | options)
    )


def _text(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_fields_that_are_accepted(client: openai.OpenAI) -> None:
    """What OpenAI's clients send along: none of it changes the answer."""
    answer = _chat(
        client, max_tokens=openai.omit, max_completion_tokens=40, user="u", metadata={"a": "b"}, store=True,
        seed=1, service_tier="auto", parallel_tool_calls=openai.omit, extra_body={"priority": 9},
        logit_bias={"5": 0}, presence_penalty=0, frequency_penalty=0, top_p=1, prompt_cache_key="k",
        safety_identifier="s",
    )  # fmt: skip
    assert answer.choices[0].message.content == PARIS
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    assert _chat(client, messages=parts).choices[0].message.content == PARIS


def test_choices_seeds_and_penalties(client: openai.OpenAI) -> None:
    """A seed gives the same answers again, several choices are several; streams have them all."""
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 12}
    first, again = _chat(client, **options), _chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    chunks = list(_chat(client, **options, stream=True, stream_options={"include_usage": True}))
    streamed = [
        "".join(
            choice.delta.content or ""
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == index
        )
        for index in range(3)
    ]
    assert streamed == texts
    assert chunks[-1].usage == first.usage
    repeated = _chat(client, messages=[{"role": "user", "content": "a a a a"}], max_tokens=20)
    punished = _chat(
        client, messages=[{"role": "user", "content": "a a a a"}], max_tokens=20, frequency_penalty=2,
        presence_penalty=2,
    )  # fmt: skip
    assert punished.choices[0].message.content != repeated.choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    """One entry a token, best first, the joined bytes are the text, and a forced answer's are finite too."""
    for options in ({}, {"response_format": FORM}):
        choice = _chat(client, logprobs=True, top_logprobs=5, **options).choices[0]
        entries = choice.logprobs.content
        told = bytes(byte for entry in entries for byte in entry.bytes).decode()
        assert told.removesuffix("<|im_end|>") == choice.message.content  # the end is a token too
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert all(math.isfinite(value) for value in (entry.logprob, *values))
            assert values == sorted(values, reverse=True)


def test_logit_bias_and_extras(client: openai.OpenAI) -> None:
    """A bias of -100 bans a token; min_p 1 and top_k 1 are greedy."""
    banned = _chat(client, logprobs=True).choices[0].logprobs.content[0].token
    tokens = client.post("/../tokenize", cast_to=object, body={"prompt": banned})
    (token,) = tokens["tokens"]  # type: ignore[index]
    other = _chat(client, logprobs=True, logit_bias={str(token): -100}).choices[0].logprobs.content[0].token
    assert other != banned
    for extra in ({"min_p": 1}, {"top_k": 1}):
        assert _chat(client, temperature=1, extra_body=extra).choices[0].message.content == PARIS


@pytest.mark.parametrize("stream", [False, True])
def test_stop_lists(client: openai.OpenAI, stream: bool) -> None:
    """The text ends before the first stop string, across chunks too."""
    answer = _chat(client, stop=["of Fr", "zzz"], stream=stream)
    text = _text(answer) if stream else answer.choices[0].message.content
    assert text == "The capital "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [FORM, {"type": "json_object"}])
def test_structured_output(client: openai.OpenAI, form: Any, stream: bool) -> None:
    """The answer is JSON, and fits the schema."""
    question: Any = [{"role": "user", "content": 'Write {"a": 1} as JSON.'}]
    options: dict[str, Any] = {"messages": question, "response_format": form, "max_tokens": 200}
    answer = _chat(client, **options, stream=stream)
    value = json.loads(_text(answer) if stream else answer.choices[0].message.content)
    if form is FORM:
        assert value["city"] in ("Paris", "Rome")
        assert value["unit"] in ("C", "F")
    else:
        assert isinstance(value, dict)


def _streamed_calls(chunks: list[Any]) -> tuple[list[dict[str, str]], str]:
    """Name and joined arguments of each call, and the finish reason."""
    calls: dict[int, dict[str, str]] = {}
    finish = ""
    for chunk in chunks:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                made = calls.setdefault(call.index, {"id": call.id or "", "name": "", "arguments": ""})
                made["name"] += call.function.name or ""
                made["arguments"] += call.function.arguments or ""
    return list(calls.values()), finish


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_forced_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    """Required or named, streamed or whole: a call whose arguments fit the schema, and then its result."""
    options: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    whole = _chat(client, max_tokens=200, **options).choices[0]
    (call,) = whole.message.tool_calls
    chunks = list(_chat(client, max_tokens=200, stream=True, **options))
    (streamed,), finish = _streamed_calls(chunks)
    assert finish == whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert streamed["name"] == call.function.name
    assert json.loads(streamed["arguments"]) == json.loads(call.function.arguments)
    assert streamed["id"]
    if choice != "required":
        assert call.function.name == "clock"
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    if choice == "required":
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        answer = _chat(client, messages=[*FRANCE, whole.message, result], tools=[WEATHER, CLOCK])
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        assert answer.usage.prompt_tokens > 100


def test_several_forced_calls(client: openai.OpenAI) -> None:
    """With parallel calls allowed there may be several; each is whole."""
    answer = _chat(
        client, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=300, temperature=1, seed=3
    )
    choice = answer.choices[0]
    assert choice.message.tool_calls or choice.finish_reason == "length"
    for call in choice.message.tool_calls or ():
        assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(choice.message.tool_calls or ())


def test_cut_tool_calls_are_not_told_as_whole(client: openai.OpenAI) -> None:
    """O7: wherever the token limit or a stop string cuts the arguments, both modes agree on the end."""
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    cuts: list[dict[str, Any]] = [{"max_tokens": limit} for limit in (1, 8, 20, 26, 29, 40, 96)]
    for cut in (*cuts, {"stop": ["city"]}, {"stop": ["uni"]}):
        whole = _chat(client, **options, **cut).choices[0]
        calls, finish = _streamed_calls(list(_chat(client, **options, **cut, stream=True)))
        assert finish == whole.finish_reason, cut
        complete = bool(calls) and all(_is_json(call["arguments"]) for call in calls)
        assert finish != "tool_calls" or complete, (cut, calls)
        assert (finish == "tool_calls") == bool(whole.message.tool_calls) or finish == "length"
        assert "<tool_call>" not in (whole.message.content or "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def test_tools_that_need_not_be_called(client: openai.OpenAI) -> None:
    """auto and none are answered; what can't be met is refused."""
    for choice in ("auto", "none"):
        answer = _chat(client, tools=[WEATHER], tool_choice=choice)
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        assert _text(_chat(client, tools=[WEATHER], tool_choice=choice, stream=True)) or choice == "auto"
    for options in (
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"tools": [WEATHER], "tool_choice": "maybe"},
    ):
        with pytest.raises(openai.BadRequestError):
            _chat(client, **options)


def test_text_completions(client: openai.OpenAI) -> None:
    """Text, token ids, echo, logprobs, several prompts."""
    tokens = client.post("/../tokenize", cast_to=object, body={"prompt": "1 2 3 4"})["tokens"]  # type: ignore[index]
    text = client.completions.create(model=MODEL, prompt="1 2 3 4", max_tokens=6, temperature=0)
    same = client.completions.create(model=MODEL, prompt=tokens, max_tokens=6, temperature=0)
    assert text.choices[0].text == same.choices[0].text
    both = client.completions.create(model=MODEL, prompt=["1 2 3 4", "a b c"], max_tokens=6, temperature=0)
    assert both.choices[0].text == text.choices[0].text
    echoed = client.completions.create(
        model=MODEL, prompt="1 2 3 4", max_tokens=6, temperature=0, echo=True, logprobs=2
    )
    assert echoed.choices[0].text == "1 2 3 4" + text.choices[0].text
    assert echoed.choices[0].logprobs is not None
    assert len(echoed.choices[0].logprobs.tokens or ()) == len(tokens) + 6
    chunks = client.completions.create(
        model=MODEL, prompt="1 2 3 4", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    """Whole, streamed, stored, continued, with tools and with a schema."""
    question = FRANCE[0]["content"]
    whole = client.responses.create(model=MODEL, input=question, temperature=0, instructions="Be brief.")
    assert "Paris" in whole.output_text
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    following = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=whole.id, temperature=0, max_output_tokens=30
    )
    assert following.usage is not None
    assert whole.usage is not None
    assert following.usage.input_tokens > whole.usage.input_tokens
    events = list(
        client.responses.create(
            model=MODEL, input=question, temperature=0, instructions="Be brief.", stream=True, store=False
        )
    )
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(
        model=MODEL, input=question, tools=[tool], tool_choice="required", temperature=0,
        max_output_tokens=200, parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"city", "unit"}
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    formed = client.responses.create(
        model=MODEL, input=question, text=form, temperature=0, max_output_tokens=200
    )
    assert json.loads(formed.output_text).keys() == {"city", "unit"}
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_response_in_the_background(client: openai.OpenAI) -> None:
    """It is made without its client, and can be cancelled."""
    made = client.responses.create(
        model=MODEL,
        input="Tell a story.",
        background=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    assert made.status == "queued"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, real: Server) -> None:
    """Statuses become the client's classes, with OpenAI's codes."""
    with pytest.raises(openai.NotFoundError) as unknown:
        _chat(client, model="nope")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        _chat(client, messages=[{"role": "user", "content": "word " * 20_000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    image: Any = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
        }
    ]
    with pytest.raises(openai.BadRequestError):
        _chat(client, messages=image)
    with pytest.raises(openai.NotFoundError) as no_vectors:
        client.embeddings.create(model=MODEL, input="x")
    assert no_vectors.value.code == "unsupported_endpoint"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{real.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
