"""The lean end of the token path: text goes from the engine's step straight to the stream's writer.

vLLM's `OutputProcessor.process_outputs` makes one pass over all requests of an engine step: statistics,
detokenising (the tokenizers library's incremental decoder), stop strings. For an ordinary request it then
builds a RequestOutput, puts it into a collector and wakes a chain of generators. A request with a TokenSink
stops after the text: the sink keeps it until its one writer takes it. What piles up while the event loop
lags is taken as one piece, so frames grow only under load, and no text waits for more to come.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from server.engine.times import TokenTimes


@dataclass(slots=True, frozen=True)
class Piece:
    """Text of one or more steps; `finish_reason` is set on the last one."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class TokenSink:
    """Takes the outputs of one request (one choice, plain text) and hands them to one reader."""

    def __init__(self, times: TokenTimes) -> None:
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self._times = times
        self._state: Any = None
        self._texts: list[str] = []
        self._finish: tuple[str, int | str | None] | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def attach(self, state: Any) -> None:
        """Puts itself in the place where `state` (vLLM's RequestState) would build a RequestOutput."""
        self._state = state
        self.num_prompt_tokens = state.prompt_len
        self._times.prompt(state.prompt_len)
        state.make_request_output = self.take

    def take(
        self,
        new_token_ids: list[int],
        pooling_output: None,
        finish_reason: Any,
        stop_reason: int | str | None,
        *_transfer: Any,
        **_more: Any,
    ) -> None:
        """Called by vLLM's output pass in the place of RequestState.make_request_output."""
        finished = finish_reason is not None
        self._texts.append(self._state.detokenizer.get_next_output_text(finished, True))
        if num_new := len(new_token_ids):
            self.num_tokens += num_new
            self._times.tokens(0, num_new, time.monotonic())
        if finished:
            self._finish = (str(finish_reason), stop_reason)
            self._times.finish(self._state.stats)
        self._wake()

    def put(self, error: Exception) -> None:
        """vLLM's OutputProcessor tells of the engine's death here."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Piece:
        """All that has come since the last call; waits while there is nothing. Raises the engine's error."""
        while not self._texts and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._texts and self._error is not None:
            raise self._error
        text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
        self._texts.clear()
        finish, stop = self._finish or (None, None)
        return Piece(text, finish, stop)
