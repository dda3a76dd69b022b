"""Keeps secrets and content out of logs and audit records.

Three rules: what looks like a secret is replaced wherever it stands; fields named like secrets or content are
never shown; an exception is shown by its type and its frames, since its text may quote a request (pydantic's
does). What other libraries log about requests is dealt with in server/logs.py.
"""

import re
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import PurePath
from types import TracebackType
from typing import Any

MASK = "***"
WITHHELD = "(withheld)"
MAX_CHAIN = 8
MAX_FRAMES = 40

SECRET_FIELDS = frozenset(
    (
        *(
            "authorization",
            "proxy-authorization",
            "proxy_authorization",
            "cookie",
            "set-cookie",
            "set_cookie",
        ),
        *("x-api-key", "x_api_key", "api_key", "apikey", "key", "secret", "token", "access_token"),
        *(
            "refresh_token",
            "id_token",
            "jwt",
            "password",
            "passwd",
            "hec_token",
            "client_secret",
            "credentials",
        ),
    )
)
CONTENT_FIELDS = frozenset(
    (
        *("prompt", "prompts", "messages", "content", "input", "inputs", "output", "outputs", "text", "body"),
        *("arguments", "tools", "tool_calls", "user", "headers", "prompt_token_ids", "token_ids", "stop"),
        *("instructions", "documents", "query", "metadata"),
    )
)
_HEADERS = r"(?:proxy-)?authorization|x-api-key|(?:set-)?cookie"
_NAMES = r"api_?key|hec_token|access_token|refresh_token|client_secret|passw(?:or)?d"
_SECRETS = re.compile(
    "|".join(
        (
            r"(?P<key>\blapilli_[A-Za-z0-9_-]{43})",
            r"(?P<jwt>\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+\.?[A-Za-z0-9_-]*)",
            rf"(?P<header>\b(?:{_HEADERS})[\"']?\s*[:=,]\s*(?:b(?=[\"']))?[\"']?)[^\"'\r\n]+",
            r"(?P<scheme>\b(?:bearer|splunk)\s+)[^\s\"',;]{4,}",
            r"(?P<basic>\bbasic\s+)[A-Za-z0-9+/]{16,}=*",
            rf"(?P<name>\b(?:{_NAMES})[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&}}]+",
            r"(?P<url>://)[^/\s@\"']*:[^/\s@\"']*@",
        )
    ),
    re.IGNORECASE,
)
_SIGNS = (
    *("lapilli_", "eyj", "authorization", "api", "cookie", "bearer", "splunk", "basic", "_token", "secret"),
    *("passw", "://"),
)
"""One of these is in every text that the pattern finds something in; looking for them costs a hundredth."""
_MADE_HERE = frozenset({"timestamp", "level", "logger"})
_NUMBERS = frozenset({bool, int, float})
_KEPT = ("header", "scheme", "basic", "name", "url")
"""Groups whose text stays, before the mask."""


def redact_text(text: str) -> str:
    """`text` with keys, tokens, credentials in headers and in URLs replaced by `***`."""
    lower = text.lower()
    for sign in _SIGNS:
        if sign in lower:
            return _SECRETS.sub(_masked, text)
    return text


def _masked(found: re.Match[str]) -> str:
    for name in _KEPT:
        if (start := found[name]) is not None:
            return start + MASK + ("@" if name == "url" else "")
    return MASK


def redact(value: Any) -> Any:
    """`value` as it may be logged: mappings, lists and texts gone through, unknown objects as their type."""
    if isinstance(value, str):
        return redact_text(value)
    if value is None or type(value) in _NUMBERS:
        return value
    if isinstance(value, Mapping):
        return {_name(name): _field(name, item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item) for item in value]
    if isinstance(value, PurePath):
        return redact_text(str(value))
    return f"<{type(value).__name__}>"


def _name(name: Any) -> Any:
    return redact_text(name) if isinstance(name, str) else name


def _field(name: Any, item: Any) -> Any:
    if item is None or type(item) in _NUMBERS:
        return item  # a count, not a secret
    lower = name.lower() if isinstance(name, str) else ""
    if lower in SECRET_FIELDS:
        return MASK
    return WITHHELD if lower in CONTENT_FIELDS else redact(item)


def redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """The structlog processor: the last one before the renderer."""
    return {name: item if name in _MADE_HERE else _field(name, item) for name, item in event.items()}


def describe_exception(error: BaseException) -> str:
    """Types and frames of an exception and of what it was raised from, without their texts.

    Texts of the operating system's errors are kept: they say nothing of a request.
    """
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(parts) < MAX_CHAIN:
        seen.add(id(link))
        parts.append(_one(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nraised from:\n".join(parts)


def _one(error: BaseException) -> str:
    text = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    kind = type(error)
    lines = [f"{kind.__module__}.{kind.__qualname__}{text}".removeprefix("builtins.")]
    lines += _frames(error.__traceback__)
    if isinstance(error, BaseExceptionGroup):
        inner = [_one(member) for member in error.exceptions[:MAX_CHAIN]]
        lines += ["  group member: " + text.replace("\n", "\n  ") for text in inner]
    return "\n".join(lines)


def _frames(start: TracebackType | None) -> list[str]:
    frames = traceback.extract_tb(start)
    shown = frames[-MAX_FRAMES:]
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in shown]
