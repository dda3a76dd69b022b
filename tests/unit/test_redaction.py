"""What may never be in a log line, and what has to stay in it."""

import json
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from auth.keys import new_key
from auth.redaction import describe_exception, redact, redact_event, redact_text
from tests.conftest import ROOT

KEY = "lapilli_" + "Ab3-_xyz01" * 4 + "abc"
JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
MARKER = "needle7f3a"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"bad key {KEY}.", "bad key ***."),
        (f"Authorization: Bearer {KEY}", "Authorization: ***"),
        (f"authorization: bearer {MARKER}", "authorization: ***"),
        (f"[(b'authorization', b'Bearer {MARKER}'), (b'accept', b'x')]", None),
        (f"{{'x-api-key': '{MARKER}', 'accept': 'x'}}", "{'x-api-key': '***', 'accept': 'x'}"),
        (f"Cookie: session={MARKER}; other={MARKER}", "Cookie: ***"),
        (f"sent Bearer {MARKER} to", "sent Bearer *** to"),
        (f"Splunk {MARKER}", "Splunk ***"),
        ("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==", "Basic ***"),
        (f"token {JWT} refused", "token *** refused"),
        (f"postgresql+asyncpg://user:{MARKER}@db/x", "postgresql+asyncpg://***@db/x"),
        (f"redis://:{MARKER}@host:6379/0", "redis://***@host:6379/0"),
        (f"hec_token={MARKER}&a=1", "hec_token=***&a=1"),
        (f'{{"api_key": "{MARKER}"}}', '{"api_key": "***"}'),
        ("lapilli_requests_total 5, lapilli_time_per_output_token_seconds_bucket", None),
        ("a basic example of splunk at http://host:80/path, bearer", None),
        ("key_0123456789ab of the tenant", None),
    ],
)
def test_texts(text: str, shown: str | None) -> None:
    """Secrets go wherever they stand; what only looks alike stays."""
    assert MARKER not in redact_text(text)
    assert KEY not in redact_text(text)
    if shown is not None:
        assert redact_text(text) == shown
    elif MARKER not in text:
        assert redact_text(text) == text


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_a_key_in_any_text_is_hidden(before: str, after: str) -> None:
    """A key is found whatever stands around it, unless it is the middle of a longer word."""
    key = new_key()
    glued = before[-1:].isalnum() or before.endswith("_")
    assert glued or key not in redact_text(before + key + after)


def test_fields_by_name() -> None:
    """Secrets and content by the names of their fields, at any depth; counts stay; objects are types."""

    class Anything:
        def __repr__(self) -> str:
            return MARKER

    event = {
        "event": "x",
        "prompt": MARKER,
        "Authorization": MARKER,
        "inner": [{"messages": [MARKER], "token": 7, "more": (Anything(), {"cookie": MARKER})}],
        "headers": {"a": MARKER},
        "status": 200,
    }
    shown = redact_event(None, "info", event)
    assert MARKER not in repr(shown)
    assert shown["event"] == "x"
    assert shown["status"] == 200
    assert shown["inner"][0]["token"] == 7
    assert shown["inner"][0]["more"][0] == "<Anything>"
    assert redact({"a": KEY, KEY: 1}) == {"a": "***", "***": 1}


def test_exceptions_without_their_texts() -> None:
    """pydantic quotes its input; types, frames and causes are enough to find the fault."""

    class Body(BaseModel):
        size: int

    try:
        try:
            Body.model_validate({"size": MARKER})
        except ValidationError as error:
            raise KeyError(MARKER) from error
    except KeyError as error:
        text = describe_exception(error)
    assert MARKER not in text
    assert text.startswith("KeyError\n")
    assert "raised from:\npydantic_core" in text
    assert "test_redaction.py" in text
    group = describe_exception(ExceptionGroup(MARKER, [ValueError(MARKER), OSError(28, "No space left")]))
    assert MARKER not in group
    assert "ValueError" in group
    assert "OSError: No space left" in group


SCRIPT = """
    import asyncio, gc, logging, sys, threading, warnings
    from server.logs import configure_logging
    from server.sections import LogSettings
    import structlog

    configure_logging(LogSettings(level="debug", format=sys.argv[1]), sees_requests=True)
    marker = "needle" + "7f3a"
    log = structlog.get_logger("server.x")

    def fail(word):
        local = word
        raise ValueError(f"bad {word}")

    def caught():
        try:
            fail(marker)
        except ValueError:
            return True

    log.info("kept_event", path="/kept", prompt=marker, error=ValueError(marker))
    for name in ("vllm.entrypoints.x", "vllm", "transformers", "asyncio", "httpcore.http11", "anything"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(level, "model output %s", marker)
    try:
        fail(marker)
    except ValueError:
        log.exception("kept_exception")
        logging.getLogger("vllm.parser.x").exception(f"in {marker}")
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    warnings.warn(f"Pydantic serializer warnings: input_value={marker}")
    thread = threading.Thread(target=fail, args=(marker,))
    thread.start()
    thread.join()

    class Bad:
        def __del__(self):
            fail(marker)

    Bad()

    async def never_awaited():
        async def inner(word):
            fail(word)
        task = asyncio.create_task(inner(marker))
        await asyncio.sleep(0)
        del task
        gc.collect()
        asyncio.get_running_loop().call_soon(fail, marker)
        await asyncio.sleep(0.01)

    asyncio.run(never_awaited())
"""


@pytest.mark.parametrize("style", ["json", "console"])
def test_all_ways_into_the_log(style: str) -> None:
    """Our loggers, others', warnings, threads, finalisers, lost tasks: no content, at debug."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), style]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert MARKER not in done.stdout + done.stderr
    for kept in ("kept_event", "/kept", "kept_exception", "thread_failed", "error_while_cleaning_up"):
        assert kept in done.stderr
    assert "in fail" in done.stderr
    assert done.stderr.count("withheld") >= 12
    if style == "json":
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        vllm = [line for line in lines if line["logger"] == "vllm.parser.x"]
        assert vllm[0]["where"].endswith("in <module>")
        assert vllm[0]["exception"].startswith("ValueError\n")
        # Of other libraries only warnings and worse are worth a line without words.
        assert {line["level"] for line in lines if line["logger"] == "vllm"} == {"warning", "error"}
