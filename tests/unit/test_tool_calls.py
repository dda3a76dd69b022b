"""O7: `tool_calls` is said only of calls that are whole, in a stream and in a whole answer."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ARGUMENTS = json.dumps({"city": "Zürich 🦀", "note": 'a "tool_calls":[ mark, "finish_reason":"tool_calls"'})


def _chunk(choice: dict[str, Any]) -> str:
    return "data: " + json.dumps({"choices": [choice]}, separators=(",", ":")) + "\n\n"


def _stream(pieces: list[str], reason: str, index: int = 0) -> list[str]:
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    chunks = [_chunk({"index": index, "delta": delta, "finish_reason": None}) for delta in deltas]
    return [*chunks, _chunk({"index": index, "delta": {"content": ""}, "finish_reason": reason})]


def _settled(chunks: list[str]) -> list[str]:
    from server.protocol.tool_calls import settled_chunks

    async def source() -> AsyncGenerator[str, None]:
        for chunk in chunks:
            yield chunk

    async def gathered() -> list[str]:
        return [chunk async for chunk in settled_chunks(source())]

    return asyncio.run(gathered())


def _reason(chunk: str) -> Any:
    return json.loads(chunk.removeprefix("data: "))["choices"][0]["finish_reason"]


@settings(deadline=None)  # the first example imports vLLM
@given(st.lists(st.integers(0, len(ARGUMENTS)), max_size=6), st.integers(0, len(ARGUMENTS)))
def test_streamed_arguments_cut_anywhere(cuts: list[int], end: int) -> None:
    """In whatever pieces they come: whole ones keep the reason, cut ones get `stop`."""
    edges = sorted({0, end, *(cut for cut in cuts if cut < end)})
    pieces = [ARGUMENTS[start:stop] for start, stop in itertools.pairwise(edges)]
    chunks = _stream(pieces, "tool_calls")
    settled = _settled(chunks)
    assert settled[:-1] == chunks[:-1]
    assert _reason(settled[-1]) == ("tool_calls" if end == len(ARGUMENTS) else "stop")


def test_choices_are_told_apart() -> None:
    """One choice's cut call says nothing of another's; `length` stays."""
    good, bad = _stream([ARGUMENTS], "tool_calls"), _stream([ARGUMENTS[:-1]], "tool_calls", index=1)
    cut = _stream([ARGUMENTS[:-1]], "length", index=2)
    settled = _settled([*good[:-1], *bad[:-1], *cut[:-1], good[-1], bad[-1], cut[-1]])
    assert [_reason(chunk) for chunk in settled[-3:]] == ["tool_calls", "stop", "length"]


@pytest.mark.parametrize(
    ("said", "engine", "arguments", "expected"),
    [
        ("tool_calls", "stop", ['{"a": 1}'], "tool_calls"),
        ("tool_calls", "length", ['{"a": 1}'], "length"),
        ("tool_calls", "length", ['{"a": '], "length"),
        ("tool_calls", "stop", ['{"a": 1}', '{"a": '], "stop"),
        ("tool_calls", "stop", ['"text"'], "stop"),
        ("tool_calls", "stop", [], "stop"),
        ("stop", "stop", ['{"a": '], "stop"),
    ],
)
def test_whole_answers(said: str, engine: str, arguments: list[str], expected: str) -> None:
    """The engine's own reason stands where a call was cut."""
    from server.protocol.tool_calls import NotedReasons, settle_reasons

    calls = [SimpleNamespace(function=SimpleNamespace(arguments=text)) for text in arguments]
    message = SimpleNamespace(tool_calls=calls)
    choice = SimpleNamespace(index=0, finish_reason=said, message=message)

    async def outputs() -> AsyncGenerator[Any, None]:
        for reason in (None, engine):
            yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=reason)])

    async def noted() -> dict[int, str]:
        reasons = NotedReasons(outputs())
        assert len([output async for output in reasons]) == 2
        return reasons.by_index

    settle_reasons(SimpleNamespace(choices=[choice]), asyncio.run(noted()))  # type: ignore[arg-type]
    assert choice.finish_reason == expected
