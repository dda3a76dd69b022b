"""`finish_reason: tool_calls` only where every call is whole.

vLLM's whole answer says it as soon as one call was found, though the token limit cut the text (it keeps the
engine's `length` in a stream alone), and both say it of calls whose arguments do not parse.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import orjson
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.outputs import RequestOutput

CALL_MARK, FINISH_MARK = '"tool_calls":[', '"finish_reason":"tool_calls"'
"""As vLLM's chunks have them; quotes within a text are escaped, so neither is ever part of one."""


class NotedReasons:
    """The engine's outputs, with each choice's finish reason noted by its index."""

    def __init__(self, outputs: AsyncIterator[RequestOutput]) -> None:
        self._outputs = outputs
        self.by_index: dict[int, str] = {}

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        async for result in self._outputs:
            for choice in result.outputs:
                if choice.finish_reason is not None:
                    self.by_index[choice.index] = choice.finish_reason
            yield result


def settle_reasons(response: ChatCompletionResponse, engine_reasons: dict[int, str]) -> None:
    """Puts the engine's reason where a choice says `tool_calls` and its calls were cut or do not parse."""
    for choice in response.choices:
        if choice.finish_reason != "tool_calls":
            continue
        reason = engine_reasons.get(choice.index, "stop")
        calls = [call.function.arguments for call in choice.message.tool_calls]
        if reason != "stop" or not _all_parse(calls):
            choice.finish_reason = reason


async def settled_chunks(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """A stream's chunks, with `stop` where the joined arguments of a choice's calls do not parse."""
    calls: defaultdict[int, defaultdict[int, str]] = defaultdict(lambda: defaultdict(str))
    try:
        async for chunk in chunks:
            if CALL_MARK in chunk:
                _gather(_choices(chunk), calls)
            yield _settled(chunk, calls) if FINISH_MARK in chunk else chunk
    finally:
        await chunks.aclose()


def _choices(chunk: str) -> list[dict[str, Any]]:
    return list(orjson.loads(chunk.removeprefix("data: "))["choices"])


def _gather(choices: list[dict[str, Any]], calls: dict[int, defaultdict[int, str]]) -> None:
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or ():
            calls[choice["index"]][call["index"]] += (call.get("function") or {}).get("arguments") or ""


def _settled(chunk: str, calls: dict[int, defaultdict[int, str]]) -> str:
    (choice,) = _choices(chunk)  # vLLM sends each choice's end in a chunk of its own
    whole = _all_parse(calls[choice["index"]].values())
    return chunk if whole else chunk.replace(FINISH_MARK, '"finish_reason":"stop"')


def _all_parse(calls: Iterable[str]) -> bool:
    found = list(calls)
    return bool(found) and all(_is_object(arguments) for arguments in found)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False
