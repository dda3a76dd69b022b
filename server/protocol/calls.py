"""How an answer with tool calls ends: `tool_calls` only where every call is whole, in a stream and out of it.

vLLM says so too for a call that the token limit has cut, but not for one that a stop string has cut, and for
`auto` its stream and its whole answer differ.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.outputs import RequestOutput

CALLS_END = '"finish_reason":"tool_calls"'


def is_whole(arguments: str) -> bool:
    """Whether a call's arguments are a JSON object."""
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


async def checked_stream(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """vLLM's SSE chunks, the end of a choice with a cut call told as `stop`."""
    arguments: dict[tuple[int, int], str] = defaultdict(str)
    try:
        async for chunk in chunks:
            if '"tool_calls"' not in chunk:
                yield chunk
                continue
            (choice,) = orjson.loads(chunk.removeprefix("data: "))["choices"]
            for call in choice["delta"].get("tool_calls") or ():
                arguments[choice["index"], call["index"]] += call["function"].get("arguments") or ""
            made = [text for (index, _), text in arguments.items() if index == choice["index"]]
            if CALLS_END in chunk and not (made and all(map(is_whole, made))):
                chunk = chunk.replace(CALLS_END, '"finish_reason":"stop"')
            yield chunk
    finally:
        await chunks.aclose()


class Ends:
    """Notes how the engine ended each choice of a whole answer."""

    def __init__(self) -> None:
        self._reasons: dict[int, str | None] = {}

    async def noting(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """The same outputs, noted."""
        async for output in outputs:
            self._reasons |= {choice.index: choice.finish_reason for choice in output.outputs}
            yield output

    def settle(self, response: ChatCompletionResponse, *, forced: bool) -> None:
        """Corrects each choice's end in place; `forced`: a call was asked for, so text is a cut one."""
        for choice in response.choices:
            calls = choice.message.tool_calls
            if forced and not calls:
                choice.message.content = None
            reason = self._reasons.get(choice.index)
            whole = bool(calls) and all(is_whole(call.function.arguments) for call in calls)
            if choice.finish_reason == "tool_calls" and (reason == "length" or not whole):
                choice.finish_reason = reason or "stop"


def expects_calls(request: Any) -> bool:
    """Whether the model may call tools in its answer."""
    return bool(request.tools) and request.tool_choice != "none"
