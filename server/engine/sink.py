"""The lean end of the token path: text goes from the engine's step straight to the connection.

vLLM's `OutputProcessor.process_outputs` makes one pass over all requests of an engine step: statistics,
detokenising (the tokenizers library's incremental decoder), stop strings. For an ordinary request it then
builds a RequestOutput, puts it into a collector and wakes a chain of generators. A request with a TokenSink
stops after the text, which has two ways on:

- at once, by `RequestContext.write`, in the same pass and with no task woken: the text of a stream that has
  begun, whose reader has sent all there was and waits for more;
- by the reader (`next`), which takes all that has come as one piece: the first text, the last, errors, and
  all that comes while the connection is full (a slow client). What waits then is at most the rest of one
  answer.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.context import RequestContext
from server.engine.pace import OutputPace
from server.engine.times import TokenTimes


@dataclass(slots=True, frozen=True)
class Piece:
    """Text of one or more steps; `finish_reason` is set on the last one."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class TokenSink:
    """Takes the outputs of one request (one choice, plain text) and hands them on, in order."""

    def __init__(self, ctx: RequestContext, times: TokenTimes, pace: OutputPace) -> None:
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.frame: Callable[[str], bytes] | None = None
        """Makes text a frame; set by the reader once the stream's first frame has been sent."""
        self._ctx = ctx
        self._times = times
        self._pace = pace
        self._state: Any = None
        self._texts: list[str] = []
        self._held_since: float | None = None
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
        now = time.monotonic()
        late = self._pace.lags(self._state.stats.last_token_ts, now)
        if num_new := len(new_token_ids):
            self.num_tokens += num_new
            self._times.tokens(0, num_new, now)
        if finished:
            self._finish = (str(finish_reason), stop_reason)
            self._times.finish(self._state.stats)
            self._wake()
        elif not (late and self._may_hold(now)):
            self.flush()

    def put(self, error: Exception) -> None:
        """vLLM's OutputProcessor tells of the engine's death here."""
        self._error = error
        self._wake()

    def _may_hold(self, now: float) -> bool:
        """Holds the text back for company, unless it has waited for long enough or is the stream's first."""
        if self.frame is None:
            return False
        if self._held_since is None:
            self._held_since = now
            self._pace.hold(self.flush)
        return now - self._held_since < self._pace.max_delay_s

    def flush(self) -> None:
        """Sends the text that is here: at once where possible, else by the reader."""
        self._held_since = None
        if not self._texts or self._waiter is None or self._waiter.done():
            return
        if self.frame is not None and self._ctx.write is not None:
            text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
            if self._ctx.write(self.frame(text)):
                self._texts.clear()
                return
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
        self._held_since = None
        finish, stop = self._finish or (None, None)
        return Piece(text, finish, stop)
