"""Rules for single values: type and range, with errors worded and coded as OpenAI does.

A rule is called with the field's name and its value (never null), and raises ApiError. No message quotes a
text of the client's.
"""

from collections.abc import Callable
from typing import Any

from server.errors import ApiError

Rule = Callable[[str, Any], None]

JSON_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def refuse(code: str, param: str, message: str) -> ApiError:
    """400 for one field."""
    return ApiError(400, message, code=code, param=param)


def wrong_type(name: str, expected: str, value: Any) -> ApiError:
    """400 for a value of another JSON type than `expected` ("an integer")."""
    got = JSON_NAMES.get(type(value), "something else")
    return refuse(
        "invalid_type", name, f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    )


def missing(name: str) -> ApiError:
    """400 for a field that must be there."""
    return refuse("missing_required_parameter", name, f"Missing required parameter: '{name}'.")


def unsupported(name: str, why: str = "is not supported here") -> ApiError:
    """400 for a field that would change what the client gets, and that this server can't do."""
    return refuse("unsupported_parameter", name, f"Unsupported parameter: '{name}' {why}.")


def integer(low: int, high: int) -> Rule:
    """A JSON integer from `low` to `high`; neither true nor 1.0 is one."""

    def check(name: str, value: Any) -> None:
        # orjson reads integers of more than 64 bits as decimals: too large, not of a wrong type
        if type(value) is not int and not (type(value) is float and abs(value) >= 2**63):
            raise wrong_type(name, "an integer", value)
        if value < low:
            raise _below(name, "integer", f">= {low}")
        if value > high or type(value) is float:
            raise _above(name, "integer", high)

    return check


def decimal(low: float, high: float, *, above_low: bool = False) -> Rule:
    """A finite number from `low` to `high`; `above_low` leaves `low` itself out."""

    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float):
            raise wrong_type(name, "a number", value)
        if value != value or value < low or (above_low and value == low):
            raise _below(name, "decimal", f"{'>' if above_low else '>='} {low}")
        if value > high:
            raise _above(name, "decimal", high)

    return check


def _below(name: str, kind: str, expected: str) -> ApiError:
    message = f"Invalid '{name}': {kind} below minimum value. Expected a value {expected}."
    return refuse(f"{kind}_below_min_value", name, message)


def _above(name: str, kind: str, high: float) -> ApiError:
    message = f"Invalid '{name}': {kind} above maximum value. Expected a value <= {high}."
    return refuse(f"{kind}_above_max_value", name, message)


def boolean(name: str, value: Any) -> None:
    """true or false."""
    if type(value) is not bool:
        raise wrong_type(name, "a boolean", value)


def text(max_chars: int, *, min_chars: int = 0) -> Rule:
    """A string of `min_chars` to `max_chars` characters."""

    def check(name: str, value: Any) -> None:
        if type(value) is not str:
            raise wrong_type(name, "a string", value)
        if len(value) > max_chars:
            message = f"Invalid '{name}': string too long. Expected at most {max_chars} characters."
            raise refuse("string_above_max_length", name, message)
        if len(value) < min_chars:
            message = f"Invalid '{name}': string too short. Expected at least {min_chars} characters."
            raise refuse("string_below_min_length", name, message)

    return check


def one_of(*values: str) -> Rule:
    """One of the given strings."""

    def check(name: str, value: Any) -> None:
        if type(value) is not str:
            raise wrong_type(name, "a string", value)
        if value not in values:
            known = ", ".join(f"'{item}'" for item in values)
            raise refuse("invalid_value", name, f"Invalid value for '{name}'. Supported values are: {known}.")

    return check


def array(of: Rule, max_items: int, *, min_items: int = 0) -> Rule:
    """A list of `min_items` to `max_items` values that each keep the rule `of`."""

    def check(name: str, value: Any) -> None:
        checked_list(name, value, max_items, min_items=min_items)
        for index, item in enumerate(value):
            of(f"{name}[{index}]", item)

    return check


def checked_list(name: str, value: Any, max_items: int, *, min_items: int = 0) -> list[Any]:
    """`value` as a list of an allowed length; its items are not looked at."""
    if type(value) is not list:
        raise wrong_type(name, "an array", value)
    if len(value) > max_items:
        message = (
            f"Invalid '{name}': array too long. Expected at most {max_items} items, but got {len(value)}."
        )
        raise refuse("array_above_max_length", name, message)
    if len(value) < min_items:
        code = "empty_array" if not value else "array_below_min_length"
        raise refuse(code, name, f"Invalid '{name}': expected at least {min_items} items.")
    return value


def checked_object(name: str, value: Any) -> dict[str, Any]:
    """`value` as an object."""
    if type(value) is not dict:
        raise wrong_type(name, "an object", value)
    return value


def bounded_json(max_depth: int, max_values: int) -> Rule:
    """Any JSON of at most `max_depth` levels and `max_values` values, names counted too."""

    def check(name: str, value: Any) -> None:
        level, count = [value], 0
        for _ in range(max_depth + 1):
            inner: list[Any] = []
            for item in level:
                if type(item) is dict:
                    inner += item.values()
                elif type(item) is list:
                    inner += item
            count += len(inner)
            if count > max_values:
                raise refuse("invalid_value", name, f"Invalid '{name}': more than {max_values} values in it.")
            if not inner:
                return
            level = inner
        raise refuse("invalid_value", name, f"Invalid '{name}': nested deeper than {max_depth} levels.")

    return check
