"""What passes validation passes vLLM's request model or is a clear 400, and can be sent to the engine."""

from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.validation import ModelLimits, Validator

RULES = Validator(ModelLimits(1000, 512))
IDS = st.lists(st.integers(0, 999), max_size=4)
TEXT = st.text('ab<|>"\\\0\n\u00e9\U0001f600', max_size=12)
ANY = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(-1e300, 1e300) | TEXT
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), min_size=1, max_size=3)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": TEXT, "arguments": st.just('{"a": 1}') | TEXT})},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": TEXT | PARTS | st.none(),
        "name": TEXT,
        "tool_call_id": TEXT,
        "tool_calls": st.lists(CALL, max_size=2),
        "reasoning": TEXT,
    },
)
SCHEMA = {"name": "x", "schema": {"type": "object"}}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "min_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**31 - 1),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(-(2**63), 2**63 - 1), "n": st.integers(1, 128), "max_tokens": st.integers(1, 512),
    "max_completion_tokens": st.integers(1, 512), "min_tokens": st.integers(0, 512),
    "stop": TEXT | st.lists(TEXT, max_size=5),
    "stop_token_ids": IDS, "allowed_token_ids": IDS, "logprob_token_ids": IDS, "bad_words": st.lists(TEXT,
    max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20), "prompt_logprobs": st.integers(0, 20),
    "stream": st.booleans(), "stream_options": st.just({"include_usage": True}),
    "stream_interval": st.integers(1, 1024),
    "repetition_detection": st.fixed_dictionaries({name: st.integers(0, 16) for name in
                                                   ("max_pattern_size", "min_pattern_size", "min_count")}),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema",
    "json_schema": SCHEMA}]),
    "structured_outputs": st.sampled_from([{"regex": "a"}, {"choice": ["a"]}, {"json": {}},
    {"json_object": True}]),
    "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function",
    "function": {"name": "f"}}]),
    "thinking_token_budget": st.integers(-1, 512), "truncate_prompt_tokens": st.integers(-1, 512),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "x"]), ANY, max_size=2),
    "metadata": st.dictionaries(TEXT, ANY, max_size=2), "reasoning_effort": st.sampled_from(["low", "none"]),
    "priority": ANY, "kv_transfer_params": ANY, "vllm_xargs": ANY, "cache_salt": ANY, "unknown": ANY,
}  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.fixed_dictionaries({}, optional={name: values | st.none() for name, values in FIELDS.items()}),
    st.dictionaries(st.sampled_from(sorted(FIELDS)), ANY, max_size=1),
)
def test_chat_bodies(messages: list[Any], good: dict[str, Any], odd: dict[str, Any]) -> None:
    """No exception but ApiError on the way, and what comes out fits the engine's wire."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMError
    from vllm.v1.serial_utils import MsgpackEncoder

    from server.protocol.bodies import parse

    body = {"messages": messages} | good | odd
    try:
        request = parse(ChatCompletionRequest, RULES.chat(orjson.dumps(body)))
    except ApiError as error:
        refused = error
    else:
        try:
            params = request.to_sampling_params(16, {})
        except (VLLMError, ValueError):  # pairs of fields that exclude each other: a 400 too
            return
        assert params.extra_args is None
        MsgpackEncoder().encode(params)
        return
    assert refused.status == 400
