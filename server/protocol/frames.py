"""SSE frames of plain chat streams, cut from vLLM's own chunks.

vLLM builds a pydantic chunk and dumps it for every token. The chunks of one stream differ in the text alone,
so here each kind of chunk is dumped once, by the same models, with marks in the varying places, and
frames are made by joining bytes. A test compares both ways byte for byte.
"""

from dataclasses import dataclass
from typing import Any

import orjson
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

ID_MARK, TEXT_MARK, FINISH_MARK, STOP_MARK = "@id@", "@text@", "@finish@", "@stop@"
CREATED_MARK = 1234567890123456789


@dataclass(frozen=True, slots=True)
class StreamFrames:
    """The frames of one stream."""

    role: bytes
    before_text: bytes
    after_text: bytes
    last: tuple[bytes, bytes, bytes, bytes]
    usage: "bytes | None"

    def text(self, text: str) -> bytes:
        """One delta of content."""
        return self.before_text + orjson.dumps(text) + self.after_text

    def finish(self, text: str, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last delta, with what ended the stream."""
        start, middle, stop, end = self.last
        values = (orjson.dumps(text), orjson.dumps(finish_reason), orjson.dumps(stop_reason))
        return b"".join((start, values[0], middle, values[1], stop, values[2], end))

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The usage chunk; empty bytes where it was not asked for."""
        if self.usage is None:
            return b""
        counts = (prompt_tokens, prompt_tokens + completion_tokens, completion_tokens)
        return self.usage % counts


class ChatFrames:
    """Makes the frames of each stream of one model."""

    def __init__(self, model: str, fingerprint: str | None) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._role = self._dump(_choice(DeltaMessage(role="assistant", content=""), None), first=True)
        self._delta = self._dump(_choice(DeltaMessage(content=TEXT_MARK), None))
        last = _choice(DeltaMessage(content=TEXT_MARK), FINISH_MARK, stop_reason=STOP_MARK)
        self._last = {usage: self._dump(last, fingerprint=not usage) for usage in (False, True)}
        self._usage = self._usage_template()

    def stream(self, request_id: str, created: int, *, usage: bool) -> StreamFrames:
        """Frames with this stream's id and time (Unix seconds)."""

        def mine(template: bytes) -> bytes:
            named = template.replace(ID_MARK.encode(), request_id.encode(), 1)
            return named.replace(str(CREATED_MARK).encode(), str(created).encode(), 1)

        before, after = mine(self._delta).split(f'"{TEXT_MARK}"'.encode())
        start, rest = mine(self._last[usage]).split(f'"{TEXT_MARK}"'.encode())
        middle, rest = rest.split(f'"{FINISH_MARK}"'.encode())
        stop, end = rest.split(f'"{STOP_MARK}"'.encode())
        return StreamFrames(
            mine(self._role), before, after, (start, middle, stop, end), mine(self._usage) if usage else None
        )

    def _dump(self, choice: Any, *, first: bool = False, fingerprint: bool = False) -> bytes:
        more: dict[str, Any] = {"prompt_token_ids": None, "prompt_text": None} if first else {}
        if fingerprint and self._fingerprint is not None:
            more["system_fingerprint"] = self._fingerprint
        chunk = self._chunk(choices=[choice], **more)
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()

    def _usage_template(self) -> bytes:
        usage = UsageInfo(prompt_tokens=1, total_tokens=2, completion_tokens=3)
        chunk = self._chunk(choices=[], usage=usage, system_fingerprint=self._fingerprint, metrics=None)
        text = chunk.model_dump_json(exclude_unset=True, exclude_none=True).replace("%", "%%")
        for name, value in (("prompt_tokens", 1), ("total_tokens", 2), ("completion_tokens", 3)):
            text = text.replace(f'"{name}":{value}', f'"{name}":%d')
        return f"data: {text}\n\n".encode()

    def _chunk(self, **fields: Any) -> ChatCompletionStreamResponse:
        return ChatCompletionStreamResponse(
            id=ID_MARK, object="chat.completion.chunk", created=CREATED_MARK, model=self._model, **fields
        )


def _choice(delta: DeltaMessage, finish: str | None, **more: Any) -> ChatCompletionResponseStreamChoice:
    if (finish is None and "content" in delta.model_fields_set and delta.role is None) or finish is not None:
        more["token_ids"] = None
    return ChatCompletionResponseStreamChoice(
        index=0, delta=delta, logprobs=None, finish_reason=finish, **more
    )
