"""The rules for request bodies: each bad value is one ApiError, and nothing else is ever raised."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.sections import RequestSettings
from server.validation import SERVER_FIELDS, ModelLimits, Validator

VOCAB, LENGTH = 1000, 512
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwC"
NUMBERS = {
    "temperature": (0, 2), "top_p": (0.001, 1), "min_p": (0, 1), "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), 2**63 - 1), "n": (1, 128), "max_tokens": (1, LENGTH), "min_tokens": (0, LENGTH),
    "max_completion_tokens": (1, LENGTH), "prompt_logprobs": (0, 20), "thinking_token_budget": (-1, LENGTH),
    "truncate_prompt_tokens": (-1, LENGTH), "stream_interval": (1, 1024),
}  # fmt: skip
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def _limits(modalities: tuple[str, ...] = (), **settings: Any) -> ModelLimits:
    return ModelLimits(VOCAB, LENGTH, modalities=frozenset(modalities), settings=RequestSettings(**settings))


RULES = Validator(_limits())
VISION = Validator(_limits(("image",), media_domains=["images.example"]))


def _chat(**fields: Any) -> dict[str, Any]:
    return RULES.chat(orjson.dumps({"messages": HI} | fields))


def _refused(body: Any, rules: Validator = RULES, kind: str = "chat") -> ApiError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        getattr(rules, kind)(data)
    error = caught.value
    assert error.status == 400
    assert error.code
    assert error.message
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"{} {}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
        b'{"a": 1e999}', b'{"a": -1e999}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"\\udc00": 1}',
        b"{'a': 1}",
        b'{"a": 1,}', b'{"a": 01}', b'\xef\xbb\xbf{}', "{}".encode("utf-16"), b"[" * 5000 + b"]" * 5000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"model": "a", "model": "b"}',
        b'{"model": "a", "mod\\u0065l": "b"}', b'{"a": "%b", "a": 1}' % (b"x" * 5000),
        b'{"a": ["%b"], "a": ["%b"]}' % (b"x" * 5000, b"y" * 5000),
        orjson.dumps({str(number): 1 for number in range(200)}),
    ],
)  # fmt: skip
def test_only_strict_json(body: bytes) -> None:
    """What two readers could read differently, or one not at all, is refused with one code."""
    assert _refused(body).code == "invalid_json"


@pytest.mark.parametrize("size", [1, 5000])
def test_equal_duplicates_pass(size: int) -> None:
    """A name given twice with one value says the same to every reader."""
    text = b"x" * size
    fields = RULES.chat(
        b'{"messages": [{"role": "user", "content": "%b"}], "messages": [{"role": "user", "content": "%b"}]}'
        % (text, text)
    )
    assert fields["messages"][0]["content"] == text.decode()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    """Bounds are inclusive; past them, of another type or beyond 64 bits is an error that names the field."""
    low, high = NUMBERS[name]
    for good in (low, high, None):
        _chat(**{name: good})
    bad = [low - 1, high + 1, "1", True, [1], {}]
    raw = ["NaN", "Infinity", "1e999", "18446744073709551616", "-9223372036854775809", "1" + "0" * 400]
    if isinstance(low, int) and isinstance(high, int) and name not in ("temperature", "min_p"):
        bad.append(1.5)
    for value in bad:
        if name.endswith("penalty") and value == 1.5:
            continue
        assert _refused({"messages": HI, name: value}).param == name, value
    for text in raw:
        error = _refused(
            b'{"messages": [{"role": "user", "content": "x"}], "%b": %b}' % (name.encode(), text.encode())
        )
        assert error.code == "invalid_json" or error.param == name


@pytest.mark.parametrize("name", ID_LISTS)
def test_token_ids(name: str) -> None:
    """Ids are rows of the model's table: 0 to its size less one."""
    more = {"logprobs": True} if name == "logprob_token_ids" else {}
    _chat(**{name: [0, VOCAB - 1]}, **more)
    for bad in ([VOCAB], [-1], [2**63], [2**64], ["1"], [1.0], [True], [None], 1, [1] * 2000):
        error = _refused({"messages": HI, name: bad} | more)
        assert str(error.param).startswith(name)


@pytest.mark.parametrize("bad", [{str(VOCAB + 100_000): 1}, {"word": 1}, {"-1": 1}, {"": 1}, {"1": "x"},
    {"1": 101}, {"٣": 1},
                                 {"1": None}, {"1.0": 1}, {" 1": 1}, [1],
                                 {str(i): 1 for i in range(1025)}])  # fmt: skip
def test_logit_bias(bad: Any) -> None:
    """Keys are ids of the vocabulary, values between -100 and 100."""
    assert _refused({"messages": HI, "logit_bias": bad}).param == "logit_bias"
    _chat(logit_bias={"0": -100, str(VOCAB - 1): 100})


@pytest.mark.parametrize("kind", ["prompt"])
def test_prompts(kind: str) -> None:
    """Texts, ids and lists of ids; ids inside the vocabulary, none empty, none mixed."""
    for good in ("x", ["x", "y"], [0, VOCAB - 1], [[0], [1, 2]]):
        RULES.completion(orjson.dumps({kind: good}))
    for bad in (None, "", [], [[]], [[], [1]], [VOCAB], [[0], [VOCAB]], [-1], [1, "x"], ["x", 1], [["x"]],
        [[1], 1], {},
                5, True, [True], [None], [1.5], [""], ["x"] * 257, [1] * (LENGTH + 1), [2**63]):  # fmt: skip
        assert _refused({kind: bad}, kind="completion").param, bad


def test_sequences_are_bounded() -> None:
    """n times prompts, and best_of above n."""
    RULES.completion(orjson.dumps({"prompt": ["x"] * 2, "n": 128, "best_of": 128}))
    assert _refused({"prompt": ["x"] * 3, "n": 128}, kind="completion").param == "n"
    assert _refused({"prompt": "x", "n": 1, "best_of": 2}, kind="completion").code == "unsupported_parameter"
    assert _refused({"prompt": "x", "best_of": 129}, kind="completion").param == "best_of"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "spell", "spell": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_pil", "image_pil": "x"}]},
        "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
        "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f",
        "arguments": "[" * 500 + "]" * 500}}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_bad_messages(message: Any, param: str) -> None:
    """Each shape is refused with the path to it."""
    assert _refused({"messages": [message]}).param == param


def test_good_messages() -> None:
    """Shapes that real clients send; what templates do not know is dropped."""
    messages = [
        {"role": "system", "content": "x", "uuid": {"deep": []}},
        {"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}, {"type": "text",
        "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "result", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "developer", "content": ""},
    ]  # fmt: skip
    fields = _chat(messages=messages)
    assert fields["messages"][0] == {"role": "system", "content": "x"}
    assert fields["messages"][1]["content"][0] == {"type": "text", "text": "a"}
    assert "tool_calls" not in fields["messages"][4]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "maybe"}, {"tool_choice": "maybe", "tools": [TOOL]}, {"tool_choice": {},
        "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []}, {"tool_choice": ["auto"], "tools": [TOOL]},
        {"tool_choice": 5, "tools": [TOOL]}, {"tools": {}}, {"tools": [{}]},
        {"tools": [{"type": "function"}]},
        {"tools": [TOOL] * 129}, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        {"functions": []}, {"function_call": "auto"},
    ],
)  # fmt: skip
def test_bad_tools(fields: dict[str, Any]) -> None:
    """A choice that can't be met and tools of the wrong shape."""
    _refused({"messages": HI} | fields)


def test_tools_that_mean_nothing_go() -> None:
    """none and auto without tools are as if nothing had been said; null beside tools means auto."""
    for choice in ("none", "auto", None):
        for tools in ({}, {"tools": None}, {"tools": []}):
            assert set(_chat(tool_choice=choice, **tools)) == {"messages"}
    assert "tool_choice" not in _chat(tool_choice=None, tools=[TOOL])


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 1},
        {"top_logprobs": 0},
        {"logprobs": 5}, {"stream_options": {"include_usage": True}}, {"stream_options": {}},
        {"stream": True, "stream_options": {"include_usage": "yes"}}, {"stream": True,
        "stream_options": []}, {"stream": "true"},
        {"stop": ["a"] * 5}, {"stop": [""]}, {"stop": ""}, {"stop": "x" * 1025}, {"stop": [1]}, {"stop": 5},
        {"use_beam_search": True}, {"modalities": ["text", "audio"]}, {"audio": {}}, {"guided_json": {}},
        {"mm_processor_kwargs": {}}, {"repetition_detection": {"max_pattern_size": 2**40, "min_count": 2}},
        {"repetition_detection": {"max_pattern_size": 65, "min_count": 2}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"x": [[]]}}, {"chat_template_kwargs": {"tokenize": True}},
        {"metadata": {"a": [[[[[1]]]]]}},
        {"response_format": {}}, {"response_format": "json"}, {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "json_schema",
        "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x",
        "schema": {"d": "x" * 70_000}}}},
        {"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "json": {}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json_object": False}}, {"structured_outputs": {"regex": "x" * 70_000}},
        {"structured_outputs": {"regex": 5}}, {"bad_words": [""]}, {"model": 5}, {"user": 5},
    ],
)  # fmt: skip
def test_bad_options(fields: dict[str, Any]) -> None:
    """Everything else that is out of bounds, in the wrong company, or not done here."""
    _refused({"messages": HI} | fields)


def test_server_fields_are_dropped() -> None:
    """What vLLM would obey and the client may not set never reaches it."""
    assert set(_chat(**dict.fromkeys(SERVER_FIELDS, 2**70 // 2**10))) == {"messages"}


def test_several_greedy_choices() -> None:
    """OpenAI takes n at temperature 0; each choice is then the best token of every step."""
    fields = _chat(n=2, temperature=0)
    assert (fields["temperature"], fields["top_k"]) == (1, 1)
    assert _chat(n=1, temperature=0)["temperature"] == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/x", "http://[::1]/x", "http://0.0.0.0/", "http://2130706433/",
        "http://localhost/x", "file:///etc/passwd",
        "https://images.example@127.0.0.1/", "https://images.example\\@127.0.0.1/",
        "https://127.0.0.1#images.example",
        "https://images.example.evil/", "https://evil.images.example/", "ftp://images.example/",
        "//images.example/", "", "x" * 9000,
        "https://images.example/" + "a" * 9000, "https://images.example /", "data:text/plain;base64,aGk=",
        "data:image/png;base64,aGk=",
        "data:image/png,xx", "data:image/png;base64,", "data:image/png;base64,%%%",
        "data:video/mp4;base64,aGk=", None, 5,
    ],
)  # fmt: skip
def test_media_urls(url: Any) -> None:
    """Only data URLs that hold an image, and hosts that the operator named, by exactly that name."""
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    assert str(_refused({"messages": [message]}, VISION).param).startswith("messages[0].content[0].image_url")


def test_good_media_urls() -> None:
    """A data URL and a named host pass; audio does not for a model that has no ears."""
    for url in (PIXEL, "https://images.example/a?b=c", "http://IMAGES.example:8080/x"):
        parts = [
            {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            {"type": "text", "text": "what?"},
        ]
        VISION.chat(orjson.dumps({"messages": [{"role": "user", "content": parts}]}))
    audio = [{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}]
    _refused({"messages": [{"role": "user", "content": audio}]}, VISION)


OTHERS = {
    "responses": [{}, {"input": "x", "temperature": 9}, {"input": "x", "max_output_tokens": 0},
    {"input": "x", "seed": 2**63},
                  {"input": [{"role": "user", "content": [{"type": "input_image",
                  "image_url": "http://127.0.0.1/"}]}]}],
    "messages": [{}, {"messages": []}, {"messages": HI, "max_tokens": 0}, {"messages": HI, "top_k": 2**40},
                 {"messages": [{"role": "user", "content": [{"type": "image",
                 "source": {"url": "http://127.0.0.1/"}}]}]}],
    "tokenize": [{}, {"prompt": 5}, {"messages": []}, {"messages": [{"role": "wizard"}]}],
    "detokenize": [{}, {"tokens": [VOCAB]}, {"tokens": [-1]}, {"tokens": "x"}, {"tokens": [1.5]}],
    "embeddings": [{}, {"input": []}, {"input": [VOCAB]}, {"input": "x", "dimensions": 0}, {"input": "x",
    "encoding_format": "hex"}],
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_bodies(kind: str) -> None:
    """The other endpoints' bodies keep the same rules."""
    for body in OTHERS[kind]:
        _refused(body, kind=kind)
    good = {"responses": {"input": "x"}, "messages": {"messages": HI, "max_tokens": 5},
        "tokenize": {"prompt": "x"},
            "detokenize": {"tokens": [1, 2]}, "embeddings": {"input": ["x"]}}[kind]  # fmt: skip
    getattr(RULES, kind)(orjson.dumps(good))


KINDS = ("chat", "completion", *OTHERS)
NAMES = sorted({*RULES._chat, *RULES._completion, "messages", "prompt", "input", "tools", "tool_choice",
    "tokens", "system"}
               | {"response_format", "structured_outputs", "functions", "text", *SERVER_FIELDS})  # fmt: skip
INNER = ("role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "image_url",
    "url", "json_schema",
         "schema", "regex", "choice", "parameters", "format", "include_usage")  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False,
        allow_infinity=False)
    | st.text("ab<|>'\"\\\0\n\u00e9\u4e2d", max_size=8) | st.sampled_from(["user", "assistant", "tool",
        "text", "image_url", "function", "auto", "required", "json_schema"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER) | st.text("ab",
        max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def _checked_or_400(kind: str, body: bytes) -> None:
    try:
        getattr(RULES, kind)(body)
    except ApiError as error:
        refused = error
    else:
        return
    assert refused.status == 400
    orjson.dumps(refused.body("/v1/chat/completions"))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_fuzz_fields(kind: str, fields: dict[str, Any]) -> None:
    """Whatever the fields are, they are either checked or one 400."""
    _checked_or_400(kind, orjson.dumps(fields))


@given(st.sampled_from(KINDS), st.binary(max_size=64))
def test_fuzz_bytes(kind: str, body: bytes) -> None:
    """Nor does any string of bytes get past the reader in another way."""
    _checked_or_400(kind, body)
