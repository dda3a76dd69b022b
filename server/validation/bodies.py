"""One function for each kind of body: bytes or fields in, checked fields out. All raise ApiError."""

from typing import Any

from server.errors import ApiError
from server.validation.limits import ModelLimits
from server.validation.messages import check_messages
from server.validation.rules import (
    boolean,
    bounded_json,
    checked_list,
    integer,
    missing,
    one_of,
    refuse,
    text,
    unsupported,
    wrong_type,
)
from server.validation.sampling import (
    apply_rules,
    chat_rules,
    check_logprobs,
    check_stream,
    completion_rules,
    sampling_rules,
    settle_greedy,
)
from server.validation.strict_json import read_object
from server.validation.tools import check_response_format, check_schema, check_structured_outputs, check_tools

SERVER_FIELDS = (
    *("request_id", "priority", "session_id", "cache_salt", "vllm_xargs", "kv_transfer_params"),
    *("ec_transfer_params", "chat_template", "watermarking", "routed_experts_prompt_start", "mm_payload"),
    *("return_mm_kwargs", "return_token_offsets", "trace_decode_token_ids"),
)
"""Body fields that vLLM would obey and that are not the client's to set; they are ignored."""
REFUSED_FIELDS = (
    *("mm_processor_kwargs", "media_io_kwargs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("guided_decoding_backend", "guided_whitespace_pattern"),
)
"""Fields that would change the answer and have no effect here: silence would mislead."""

_any_json = bounded_json(64, 200_000)


class Validator:
    """The rules for requests to one model."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
        self._chat = chat_rules(limits)
        self._completion = completion_rules(limits)
        self._sampling = sampling_rules(limits)
        self._token_id = integer(0, limits.vocab_size - 1)

    def chat(self, body: bytes) -> dict[str, Any]:
        """The fields of a /v1/chat/completions body."""
        fields = client_fields(read_object(body))
        check_messages(fields.get("messages"), self.limits)
        self._check_chat_options(fields)
        return fields

    def completion(self, body: bytes) -> dict[str, Any]:
        """The fields of a /v1/completions body."""
        fields = client_fields(read_object(body))
        apply_rules(self._completion, fields)
        check_stream(fields)
        self._check_forms(fields)
        num_prompts = self.check_prompt("prompt", fields.get("prompt"))
        self._check_sequences(fields, num_prompts)
        if fields.get("max_tokens") == 0 and not fields.get("echo"):
            integer(1, self.limits.max_model_len)("max_tokens", 0)
        settle_greedy(fields)
        return fields

    def responses(self, body: bytes) -> dict[str, Any]:
        """The fields of a /v1/responses body: numbers, sizes, depth; shapes of items are vLLM's."""
        fields = client_fields(read_object(body))
        rules = self._sampling | {
            "max_output_tokens": integer(1, self.limits.max_model_len),
            "top_logprobs": self._chat["top_logprobs"],
            "previous_response_id": text(256),
            "instructions": text(2**26),
            "tools": bounded_json(64, 20_000),
            "text": bounded_json(64, 20_000),
            "background": boolean,
            "tool_choice": bounded_json(8, 1024),
            "input": _any_json,
        }
        rules.pop("stream_options")
        apply_rules(rules, fields)
        if fields.get("input") is None:
            raise missing("input")
        self._check_media_in(fields["input"], "input")
        form = fields["text"].get("format") if isinstance(fields.get("text"), dict) else None
        if isinstance(form, dict) and form.get("schema") is not None:
            check_schema("text.format.schema", form["schema"], self.limits.settings.grammar_max_bytes)
        return fields

    def messages(self, body: bytes) -> dict[str, Any]:
        """The fields of an Anthropic /v1/messages body, in the same way."""
        fields = client_fields(read_object(body))
        rules = self._sampling | {
            "temperature": self._sampling["temperature"],
            "stop_sequences": self._sampling["stop"],
            "system": _any_json,
            "messages": _any_json,
            "tools": bounded_json(64, 20_000),
            "tool_choice": bounded_json(8, 1024),
        }
        apply_rules(rules, fields)
        checked = checked_list("messages", fields.get("messages"), 16384, min_items=1)
        self._check_media_in(checked, "messages")
        return fields

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """The fields of a /tokenize body: a prompt, or messages."""
        fields = client_fields(read_object(body))
        apply_rules(self._chat, fields)
        if fields.get("messages") is not None:
            check_messages(fields["messages"], self.limits)
            check_tools(fields)
        elif fields.get("prompt") is None:
            raise missing("prompt")
        else:
            text(2**26)("prompt", fields["prompt"])
        return fields

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """The fields of a /detokenize body."""
        fields = client_fields(read_object(body))
        apply_rules({"model": self._sampling["model"]}, fields)
        tokens = checked_list("tokens", fields.get("tokens"), self.limits.max_model_len)
        self._check_ids("tokens", tokens)
        return fields

    def embeddings(self, body: bytes) -> dict[str, Any]:
        """The fields of a /v1/embeddings body."""
        fields = client_fields(read_object(body))
        rules = {
            name: self._chat[name] for name in ("model", "user", "truncate_prompt_tokens", "truncation_side")
        }
        rules |= {"dimensions": integer(1, 2**20), "encoding_format": one_of("float", "base64")}
        rules |= {"add_special_tokens": boolean}
        apply_rules(rules, fields)
        if fields.get("messages") is not None:
            check_messages(fields["messages"], self.limits)
        else:
            num_inputs = self.check_prompt("input", fields.get("input"))
            self._check_sequences(fields, num_inputs, "input")
        return fields

    def check_prompt(self, name: str, prompt: Any) -> int:
        """A text, texts, token ids or lists of them; how many prompts that is."""
        if prompt is None:
            raise missing(name)
        if type(prompt) is str:
            if not prompt:
                raise refuse("invalid_value", name, f"Invalid '{name}': it must not be empty.")
            return 1
        if type(prompt) is not list:
            raise wrong_type(name, "a string or an array", prompt)
        if not prompt:
            raise refuse("empty_array", name, f"Invalid '{name}': expected at least one item.")
        if type(prompt[0]) is str:
            for index, item in enumerate(prompt):
                text(2**26, min_chars=1)(f"{name}[{index}]", item)
            return len(prompt)
        if type(prompt[0]) is list:
            for index, item in enumerate(prompt):
                ids = checked_list(f"{name}[{index}]", item, self.limits.max_model_len, min_items=1)
                self._check_ids(f"{name}[{index}]", ids)
            return len(prompt)
        self._check_ids(name, prompt)
        return 1

    def _check_ids(self, name: str, ids: list[Any]) -> None:
        """Token ids inside the model's vocabulary: an embedding table is not asked for rows it has not."""
        if len(ids) > self.limits.max_model_len:
            raise context_exceeded(self.limits.max_model_len, len(ids))
        if set(map(type, ids)) <= {int} and (
            not ids or (min(ids) >= 0 and max(ids) < self.limits.vocab_size)
        ):
            return
        for index, item in enumerate(ids):
            self._token_id(f"{name}[{index}]", item)

    def _check_chat_options(self, fields: dict[str, Any]) -> None:
        apply_rules(self._chat, fields)
        check_logprobs(fields)
        check_stream(fields)
        check_tools(fields)
        self._check_forms(fields)
        self._check_sequences(fields, 1)
        settle_greedy(fields)

    def _check_forms(self, fields: dict[str, Any]) -> None:
        max_bytes = self.limits.settings.grammar_max_bytes
        if fields.get("response_format") is not None:
            check_response_format(fields["response_format"], max_bytes)
        if fields.get("structured_outputs") is not None:
            check_structured_outputs(fields["structured_outputs"], max_bytes)

    def _check_sequences(self, fields: dict[str, Any], num_prompts: int, name: str = "n") -> None:
        """`best_of` above n would need answers that nobody sees; n times prompts is bounded."""
        n = fields.get("n") or 1
        if fields.pop("best_of", None) not in (None, n):
            raise unsupported("best_of", "other than 'n' is not supported here")
        most = self.limits.settings.max_sequences
        if n * num_prompts > most:
            message = (
                f"Too many sequences: n times prompts is {n * num_prompts}; this server takes at most {most}."
            )
            raise refuse("invalid_value", name, message)

    def _check_media_in(self, value: Any, name: str) -> None:
        """Refuses media anywhere in a body of nested parts, for a model that takes text alone."""
        if self.limits.modalities:
            return
        level = [value]
        while level:
            objects = [item for item in level if isinstance(item, dict)]
            for item in objects:
                kind = item.get("type")
                if isinstance(kind, str) and kind in MEDIA_TYPES:
                    message = f"Invalid content type: '{kind}' is not supported by this model."
                    raise refuse("invalid_value", name, message)
            lists = [item for item in level if isinstance(item, list)]
            level = [inner for item in objects for inner in item.values()]
            level += [inner for item in lists for inner in item]


MEDIA_TYPES = frozenset(
    (
        "image",
        "image_url",
        "input_image",
        "input_audio",
        "audio_url",
        "video_url",
        "input_file",
        "document",
        "file",
    )
)


def client_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those that are the server's; what is refused whole is refused here."""
    for name in SERVER_FIELDS:
        fields.pop(name, None)
    for name in REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise unsupported(name)
    return fields


def context_exceeded(limit: int, given: int) -> ApiError:
    """400 in OpenAI's words for a prompt that the model can't hold."""
    message = f"This model's maximum context length is {limit} tokens, but the prompt has {given}."
    return refuse("context_length_exceeded", "prompt", message)
