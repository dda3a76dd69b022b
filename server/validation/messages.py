"""Chat messages: roles, content, parts, tool calls."""

from typing import Any

import orjson

from server.validation.limits import ModelLimits
from server.validation.media import check_base64, check_media_url
from server.validation.rules import (
    bounded_json,
    checked_list,
    checked_object,
    missing,
    one_of,
    refuse,
    text,
    wrong_type,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
    | {"reasoning", "reasoning_content", "tools"}
)
"""Fields of a message that templates know; others are dropped."""
MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_CALLS = 256
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 2**26
"""No bound of its own: the body's size and the context length hold it."""
MEDIA_PARTS = {
    "image_url": "image",
    "audio_url": "audio",
    "video_url": "video",
    "input_audio": "audio",
}
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")

_text = text(MAX_TEXT_CHARS)
_name = text(MAX_NAME_CHARS)
_role = one_of(*ROLES)
_small_json = bounded_json(16, 10_000)


def check_messages(messages: Any, limits: ModelLimits, name: str = "messages") -> None:
    """All messages of a chat; unknown fields are dropped from them in place."""
    if messages is None:
        raise missing(name)
    for index, message in enumerate(checked_list(name, messages, MAX_MESSAGES, min_items=1)):
        if not _is_plain(message):
            where = f"{name}[{index}]"
            checked_object(where, message)
            _check_message(where, message, limits)


def _is_plain(message: Any) -> bool:
    """A role and a text, as most are: nothing more to look at."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") in ROLES
    )


def _check_message(where: str, message: dict[str, Any], limits: ModelLimits) -> None:
    if not FIELDS.issuperset(message):
        for field in message.keys() - FIELDS:
            del message[field]
    role = message.get("role")
    if role is None:
        raise missing(f"{where}.role")
    _role(f"{where}.role", role)
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None:
            _name(f"{where}.{field}", message[field])
    for field in ("reasoning", "reasoning_content", "refusal"):
        if message.get(field) is not None:
            _text(f"{where}.{field}", message[field])
    if role == "assistant":
        _check_assistant(where, message, limits)
        return
    for field in ("tool_calls", "function_call"):
        message.pop(field, None)
    if message.get("tools") is not None:
        _small_json(f"{where}.tools", message["tools"])
    _check_content(f"{where}.content", message.get("content"), limits)


def _check_assistant(where: str, message: dict[str, Any], limits: ModelLimits) -> None:
    """Content may be null beside calls, a refusal or reasoning; calls that are null or [] are none."""
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    else:
        for index, call in enumerate(checked_list(f"{where}.tool_calls", message["tool_calls"], MAX_CALLS)):
            _check_call(f"{where}.tool_calls[{index}]", call)
    if message.get("function_call") is not None:
        _check_function(f"{where}.function_call", message["function_call"])
    if message.get("audio") is not None:
        raise refuse("unsupported_parameter", f"{where}.audio", f"'{where}.audio' is not supported here.")
    others = ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content")
    if message.get("content") is not None or not any(message.get(field) for field in others):
        _check_content(f"{where}.content", message.get("content"), limits)


def _check_call(where: str, call: Any) -> None:
    checked_object(where, call)
    if call.get("id") is not None:
        _name(f"{where}.id", call["id"])
    if call.get("type") not in (None, "function"):
        raise refuse(
            "invalid_value", f"{where}.type", f"Invalid value for '{where}.type': expected 'function'."
        )
    _check_function(f"{where}.function", call.get("function"))


def _check_function(where: str, function: Any) -> None:
    if function is None:
        raise missing(where)
    checked_object(where, function)
    if function.get("name") is None:
        raise missing(f"{where}.name")
    _name(f"{where}.name", function["name"])
    arguments = function.get("arguments")
    if arguments is None:
        function["arguments"] = "{}"
    elif isinstance(arguments, dict):  # some clients send the object itself
        _small_json(f"{where}.arguments", arguments)
        function["arguments"] = orjson.dumps(arguments).decode()
    else:
        _check_arguments(f"{where}.arguments", arguments)


def _check_arguments(where: str, arguments: Any) -> None:
    """Text that is JSON: templates are given the value, so what can't be read can't be rendered."""
    _text(where, arguments)
    if not arguments.strip():
        return
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        raise refuse("invalid_value", where, f"Invalid '{where}': not valid JSON.") from None
    _small_json(where, value)


def _check_content(where: str, content: Any, limits: ModelLimits) -> None:
    if type(content) is str:
        return
    if type(content) is not list:
        raise wrong_type(where, "a string or an array", content)
    for index, part in enumerate(checked_list(where, content, MAX_PARTS, min_items=1)):
        checked_object(f"{where}[{index}]", part)
        _check_part(f"{where}[{index}]", part, limits)


def _check_part(where: str, part: dict[str, Any], limits: ModelLimits) -> None:
    kind = part.get("type")
    if kind is None:
        raise missing(f"{where}.type")
    if kind in ("text", "refusal"):
        if part.get(kind) is None:
            raise missing(f"{where}.{kind}")
        _text(f"{where}.{kind}", part[kind])
    elif type(kind) is str and kind in MEDIA_PARTS:
        _check_media_part(where, part, kind, limits)
    else:
        known = ", ".join(f"'{item}'" for item in ("text", "refusal", *MEDIA_PARTS))
        message = f"Invalid value for '{where}.type'. Supported values are: {known}."
        raise refuse("invalid_value", f"{where}.type", message)
    for field in part.keys() - {"type", kind, "cache_control"}:
        del part[field]  # among them vLLM's uuid, which names an entry of a cache that all callers share


def _check_media_part(where: str, part: dict[str, Any], kind: str, limits: ModelLimits) -> None:
    if MEDIA_PARTS[kind] not in limits.modalities:
        message = f"Invalid content type: '{kind}' is not supported by this model."
        raise refuse("invalid_value", f"{where}.type", message)
    value = part.get(kind)
    if value is None:
        raise missing(f"{where}.{kind}")
    checked_object(f"{where}.{kind}", value)
    if kind == "input_audio":
        one_of(*AUDIO_FORMATS)(f"{where}.{kind}.format", value.get("format"))
        _text(f"{where}.{kind}.data", value.get("data"))
        check_base64(f"{where}.{kind}.data", value["data"])
        return
    if value.get("detail") is not None:
        one_of("auto", "low", "high")(f"{where}.{kind}.detail", value["detail"])
    check_media_url(f"{where}.{kind}.url", value.get("url"), MEDIA_PARTS[kind], limits)
