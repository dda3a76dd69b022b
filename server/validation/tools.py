"""Tools, the choice among them, and forms that an answer must keep (`response_format` and the like).

Only shapes and sizes: whether a grammar compiles, server/engine/grammar.py finds out, in a process apart.
"""

import re
from typing import Any

import orjson

from server.validation.rules import (
    boolean,
    bounded_json,
    checked_list,
    checked_object,
    missing,
    one_of,
    refuse,
    text,
    wrong_type,
)

MAX_TOOLS = 128
"""OpenAI's bound."""
MAX_DESCRIPTION_CHARS = 16384
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""OpenAI's letters, and those that MCP servers use besides."""
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 1024

_schema = bounded_json(48, 20_000)
_description = text(MAX_DESCRIPTION_CHARS)


def check_tools(fields: dict[str, Any]) -> None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; without tools none and auto mean nothing and go."""
    for field in ("functions", "function_call"):
        if fields.get(field) is not None:
            raise refuse(
                "unsupported_parameter", field, f"'{field}' is deprecated and not supported; use 'tools'."
            )
    tools = fields.get("tools")
    names = set()
    if tools is not None:
        for index, tool in enumerate(checked_list("tools", tools, MAX_TOOLS)):
            names.add(_check_tool(f"tools[{index}]", tool))
    _check_choice(fields.get("tool_choice"), names)
    if not tools:
        for field in ("tools", "tool_choice", "parallel_tool_calls"):
            fields.pop(field, None)
    elif fields.get("tool_choice") is None:
        fields.pop("tool_choice", None)  # null is unset, which means auto beside tools


def _check_tool(where: str, tool: Any) -> str:
    checked_object(where, tool)
    if tool.get("type") != "function":
        raise refuse(
            "invalid_value",
            f"{where}.type",
            f"Invalid value for '{where}.type'. Supported values are: 'function'.",
        )
    function = tool.get("function")
    if function is None:
        raise missing(f"{where}.function")
    checked_object(f"{where}.function", function)
    name = check_name(f"{where}.function.name", function.get("name"))
    if function.get("description") is not None:
        _description(f"{where}.function.description", function["description"])
    if function.get("strict") is not None:
        boolean(f"{where}.function.strict", function["strict"])
    if function.get("parameters") is not None:
        checked_object(f"{where}.function.parameters", function["parameters"])
        _schema(f"{where}.function.parameters", function["parameters"])
    return name


def check_name(where: str, name: Any) -> str:
    """The name of a function or a schema."""
    if name is None:
        raise missing(where)
    if type(name) is not str:
        raise wrong_type(where, "a string", name)
    if not NAME.fullmatch(name):
        raise refuse(
            "invalid_value",
            where,
            f"Invalid '{where}': expected 1 to 128 of the characters A-Z a-z 0-9 _ - . : /.",
        )
    return name


def _check_choice(choice: Any, names: set[str]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type", "function") != "function" or type(function) is not dict:
            message = 'Invalid \'tool_choice\': expected {"type": "function", "function": {"name": ...}}.'
            raise refuse("invalid_value", "tool_choice", message)
        name = check_name("tool_choice.function.name", function.get("name"))
        if name not in names:
            message = "Invalid 'tool_choice': the function is not among 'tools'."
            raise refuse("invalid_value", "tool_choice", message)
    elif choice != "required":
        message = "Invalid 'tool_choice'. Supported values: 'none', 'auto', 'required', or a named function."
        raise refuse("invalid_value", "tool_choice", message)
    elif not names:
        raise refuse("invalid_value", "tool_choice", "Invalid 'tool_choice': 'required' needs 'tools'.")


def check_response_format(value: Any, max_bytes: int, where: str = "response_format") -> None:
    """`{"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}`."""
    checked_object(where, value)
    kind = value.get("type")
    if kind is None:
        raise missing(f"{where}.type")
    one_of("text", "json_object", "json_schema", "structural_tag")(f"{where}.type", kind)
    if kind == "structural_tag":
        _schema(where, value)
        _check_size(where, value, max_bytes)
    elif kind == "json_schema":
        schema = value.get("json_schema")
        if schema is None:
            raise missing(f"{where}.json_schema")
        checked_object(f"{where}.json_schema", schema)
        _check_json_schema(f"{where}.json_schema", schema, max_bytes)


def _check_json_schema(where: str, value: dict[str, Any], max_bytes: int) -> None:
    check_name(f"{where}.name", value.get("name"))
    if value.get("description") is not None:
        _description(f"{where}.description", value["description"])
    if value.get("strict") is not None:
        boolean(f"{where}.strict", value["strict"])
    if value.get("schema") is None:
        raise missing(f"{where}.schema")
    check_schema(f"{where}.schema", value["schema"], max_bytes)


def check_schema(where: str, schema: Any, max_bytes: int) -> None:
    """A JSON schema: an object of bounded depth and size."""
    checked_object(where, schema)
    _schema(where, schema)
    _check_size(where, schema, max_bytes)


def check_structured_outputs(value: Any, max_bytes: int, where: str = "structured_outputs") -> None:
    """vLLM's field: exactly one kind of constraint, of a bounded size."""
    checked_object(where, value)
    given = [kind for kind in CONSTRAINTS if value.get(kind) is not None]
    if len(given) != 1:
        message = f"Invalid '{where}': give exactly one of {', '.join(CONSTRAINTS)}."
        raise refuse("invalid_value", where, message)
    kind = given[0]
    constraint, where_kind = value[kind], f"{where}.{kind}"
    if kind == "json_object":
        if constraint is not True:
            raise refuse("invalid_value", where_kind, f"Invalid '{where_kind}': only true has a meaning.")
    elif kind == "choice":
        for index, item in enumerate(checked_list(where_kind, constraint, MAX_CHOICES, min_items=1)):
            text(max_bytes, min_chars=1)(f"{where_kind}[{index}]", item)
    elif kind == "json" and isinstance(constraint, dict):
        _schema(where_kind, constraint)
    else:
        text(max_bytes, min_chars=1)(where_kind, constraint)
    _check_size(where_kind, constraint, max_bytes)
    if value.get("whitespace_pattern") is not None:
        raise refuse(
            "unsupported_parameter",
            f"{where}.whitespace_pattern",
            "'whitespace_pattern' is not supported here.",
        )


def _check_size(where: str, value: Any, max_bytes: int) -> None:
    size = len(orjson.dumps(value))
    if size > max_bytes:
        message = f"Invalid '{where}': {size} bytes of grammar; this server takes at most {max_bytes}."
        raise refuse("invalid_value", where, message)
