"""When the tokens of an engine request came, noted on the HTTP request's context."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from server.context import RequestContext


class TokenTimes:
    """Notes one engine request's tokens and times on its context."""

    def __init__(self, ctx: RequestContext, on_gap: Callable[[float, int], None], *, streamed: bool) -> None:
        self._ctx = ctx
        self._on_gap = on_gap
        self._streamed = streamed
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = defaultdict(int)

    def prompt(self, num_tokens: int) -> None:
        """The prompt's length; called once."""
        self._ctx.prompt_tokens += num_tokens

    def tokens(self, index: int, num_new: int, now: float) -> None:
        """`num_new` tokens of choice `index` came at `now` (monotonic seconds)."""
        ctx = self._ctx
        ctx.completion_tokens += num_new
        self._tokens[index] += num_new
        ctx.longest_choice_tokens = max(ctx.longest_choice_tokens, self._tokens[index])
        if not self._streamed:
            return
        if ctx.first_token_at is None:
            ctx.first_token_at = now
        ctx.last_token_at = now
        if index in self._last:
            self._on_gap(now - self._last[index], num_new)
        self._last[index] = now

    def finish(self, times: Any) -> None:
        """The engine's own timestamps: monotonic, and of this host's clock (vllm/v1/metrics/stats.py)."""
        ctx = self._ctx
        if times is None or not times.scheduled_ts or not times.first_token_ts:
            return
        ctx.queue_s = max(0.0, times.scheduled_ts - times.queued_ts)
        ctx.prefill_s = times.first_token_ts - times.scheduled_ts
        ctx.decode_s = times.last_token_ts - times.first_token_ts
        if not self._streamed:
            # A whole answer shows up once, at its end: when its tokens came, the engine knows.
            ctx.first_token_at = min(ctx.first_token_at or times.first_token_ts, times.first_token_ts)
            ctx.last_token_at = max(ctx.last_token_at or 0.0, times.last_token_ts)
