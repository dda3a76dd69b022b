"""How an answer is drawn: numbers, token ids, stop lists. One table of rules for each kind of body."""

from typing import Any

from server.validation.limits import MAX_TOP_LOGPROBS, ModelLimits
from server.validation.rules import (
    Rule,
    array,
    boolean,
    bounded_json,
    checked_list,
    checked_object,
    decimal,
    integer,
    one_of,
    refuse,
    text,
    unsupported,
    wrong_type,
)

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOPS = 4
"""OpenAI's bound, and vLLM's (VLLM_MAX_STOP_STRINGS)."""
MAX_STOP_CHARS = 1024
"""vLLM holds back as much text of a stream as its longest stop string has."""
MAX_BIASES = MAX_ALLOWED_IDS = 1024
MAX_STOP_IDS = MAX_LOGPROB_IDS = 128
"""Widths of the sampler's buffers (vllm/v1/worker/gpu/sample/logit_bias.py, vllm/sampling_params.py)."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 64
MAX_REPETITION_PATTERN, MAX_REPETITION_COUNT = 64, 16
"""The search for repetitions costs their product at each token, in the engine's own loop."""
MAX_STREAM_INTERVAL = 1024
TRUE_FALSE = (
    *("stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *(
        "spaces_between_special_tokens",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("parallel_tool_calls", "include_reasoning", "return_tokens_as_token_ids", "return_token_ids"),
    *("return_prompt_text", "store"),
)


TEMPLATE_ARGUMENTS = (
    *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("processor_kwargs", "self"),
)
"""Arguments of apply_chat_template that are not the client's to set by the way of chat_template_kwargs."""


def sampling_rules(limits: ModelLimits) -> dict[str, Rule]:
    """Rules for the fields that all kinds of generation share, by field name."""
    length, vocab = limits.max_model_len, limits.vocab_size
    token_id = integer(0, vocab - 1)
    rules: dict[str, Rule] = {
        "temperature": decimal(0, 2),
        "top_p": decimal(0, 1, above_low=True),
        "min_p": decimal(0, 1),
        "top_k": integer(-1, INT32_MAX),
        "presence_penalty": decimal(-2, 2),
        "frequency_penalty": decimal(-2, 2),
        "repetition_penalty": decimal(0.01, 100),
        "length_penalty": decimal(-100, 100),
        "seed": integer(INT64_MIN, INT64_MAX),
        "n": integer(1, limits.settings.max_choices),
        "max_tokens": integer(1, length),
        "min_tokens": integer(0, length),
        "stop": _check_stop,
        "stop_token_ids": array(token_id, MAX_STOP_IDS),
        "allowed_token_ids": array(token_id, MAX_ALLOWED_IDS, min_items=1),
        "logprob_token_ids": array(token_id, MAX_LOGPROB_IDS),
        "bad_words": array(text(MAX_BAD_WORD_CHARS, min_chars=1), MAX_BAD_WORDS),
        "logit_bias": _logit_bias(vocab),
        "prompt_logprobs": integer(0, limits.max_logprobs),
        "thinking_token_budget": integer(-1, length),
        "truncate_prompt_tokens": integer(-1, length),
        "truncation_side": one_of("left", "right"),
        "stream_interval": integer(1, MAX_STREAM_INTERVAL),
        "repetition_detection": _check_repetition,
        "stream_options": _check_stream_options,
        "use_beam_search": _refuse_true,
        "model": text(512, min_chars=1),
        "user": text(1024),
        "metadata": bounded_json(4, 256),
    }
    return rules | dict.fromkeys(TRUE_FALSE, boolean)


def chat_rules(limits: ModelLimits) -> dict[str, Rule]:
    """Rules for /v1/chat/completions, all but messages, tools and forms."""
    return sampling_rules(limits) | {
        "max_completion_tokens": integer(1, limits.max_model_len),
        "logprobs": boolean,
        "top_logprobs": integer(0, min(MAX_TOP_LOGPROBS, limits.max_logprobs)),
        "reasoning_effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "documents": bounded_json(3, 4096),
        "chat_template_kwargs": _check_template_kwargs,
        "modalities": _check_modalities,
        "audio": _refuse,
        "web_search_options": _refuse,
    }


def completion_rules(limits: ModelLimits) -> dict[str, Rule]:
    """Rules for /v1/completions, all but the prompt."""
    return sampling_rules(limits) | {
        "logprobs": integer(0, limits.max_logprobs),
        "max_tokens": integer(0, limits.max_model_len),
        "best_of": integer(1, limits.settings.max_choices),
        "suffix": text(2**20),
        "prompt_embeds": _refuse,
    }


def apply_rules(rules: dict[str, Rule], fields: dict[str, Any]) -> None:
    """Calls each field's rule; null is unset. Fields without a rule pass."""
    for name, value in fields.items():
        if value is not None and (rule := rules.get(name)) is not None:
            rule(name, value)


def check_logprobs(fields: dict[str, Any]) -> None:
    """Chat's pair of fields: a number of alternatives only beside `logprobs: true`."""
    if fields.get("top_logprobs") is not None and not fields.get("logprobs"):
        message = "'top_logprobs' is only allowed when 'logprobs' is true."
        raise refuse("invalid_value", "top_logprobs", message)
    if fields.get("logprob_token_ids") and not fields.get("logprobs"):
        raise refuse("invalid_value", "logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")


def check_stream(fields: dict[str, Any]) -> None:
    """OpenAI's rule: options of a stream only with a stream."""
    if fields.get("stream_options") is not None and not fields.get("stream"):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise refuse("invalid_value", "stream_options", message)
    if fields.get("prompt_logprobs") and fields.get("stream"):
        raise refuse("invalid_value", "prompt_logprobs", "'prompt_logprobs' is not available in a stream.")


def settle_greedy(fields: dict[str, Any]) -> None:
    """Several choices at temperature 0, which OpenAI allows and vLLM refuses: the best token of each step."""
    if fields.get("temperature") == 0 and (fields.get("n") or 1) > 1:
        fields["temperature"], fields["top_k"] = 1, 1


def _check_stop(name: str, value: Any) -> None:
    if type(value) is str:
        value = [value]
    elif type(value) is not list:
        raise wrong_type(name, "a string or an array", value)
    array(text(MAX_STOP_CHARS, min_chars=1), MAX_STOPS)(name, value)


def _logit_bias(vocab: int) -> Rule:
    bias = decimal(-100, 100)

    def check(name: str, value: Any) -> None:
        checked_object(name, value)
        if len(value) > MAX_BIASES:
            message = f"Invalid '{name}': object with too many properties. Expected at most {MAX_BIASES}."
            raise refuse("object_above_max_properties", name, message)
        for key, number in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab):
                message = f"Invalid '{name}': keys must be token ids of this model, from 0 to {vocab - 1}."
                raise refuse("invalid_value", name, message)
            bias(name, number)

    return check


def _check_repetition(name: str, value: Any) -> None:
    checked_object(name, value)
    for field, high in (
        ("max_pattern_size", MAX_REPETITION_PATTERN),
        ("min_pattern_size", MAX_REPETITION_PATTERN),
        ("min_count", MAX_REPETITION_COUNT),
    ):
        if field in value:
            integer(0, high)(f"{name}.{field}", value[field])


def _check_stream_options(name: str, value: Any) -> None:
    checked_object(name, value)
    for field in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
        if value.get(field) is not None:
            boolean(f"{name}.{field}", value[field])


def _check_template_kwargs(name: str, value: Any) -> None:
    """Switches of the template (`enable_thinking`): plain values, and no argument of transformers."""
    checked_object(name, value)
    if len(value) > 32:
        raise refuse("object_above_max_properties", name, f"Invalid '{name}': at most 32 properties.")
    for key, item in value.items():
        if key in TEMPLATE_ARGUMENTS:
            raise unsupported(f"{name}.{key}")
        if item is not None and type(item) not in (bool, int, float, str):
            raise wrong_type(f"{name}.{key}", "a plain value", item)


def _check_modalities(name: str, value: Any) -> None:
    if checked_list(name, value, 8) != ["text"]:
        raise unsupported(name, 'other than ["text"] is not supported here')


def _refuse(name: str, _value: Any) -> None:
    raise unsupported(name)


def _refuse_true(name: str, value: Any) -> None:
    boolean(name, value)
    if value:
        raise unsupported(name)
