"""When the gateway lags behind the engine: how far, and whose text waits to be sent with what comes next.

Each frame costs a system call and most of a token's CPU time. While the event loop keeps up, every token is a
frame, at once. When it does not, frames of several tokens are what lets it catch up, so text may then wait,
`max_delay_s` at most. The first token and the end of a stream never wait.
"""

import asyncio
from collections.abc import Callable

LAGS_FROM_S = 0.005
"""Lag from which text may wait: less is what one engine step of many streams takes by itself."""


class OutputPace:
    """The lag of one engine client, and its streams that hold text back."""

    def __init__(self, max_delay_s: float, on_lag: Callable[[float], None]) -> None:
        """`on_lag(seconds)` is called once for each engine step."""
        self.max_delay_s = max_delay_s
        self._on_lag = on_lag
        self._step_at = 0.0
        self._lags = False
        self._held: list[Callable[[], None]] = []

    def lags(self, step_at: float, now: float) -> bool:
        """Whether the gateway is late with the step that the engine ended at `step_at`.

        Both are monotonic seconds: one clock for all processes of a machine.
        """
        if step_at != self._step_at:
            self._step_at = step_at
            lag_s = max(0.0, now - step_at)
            self._on_lag(lag_s)
            self._lags = lag_s > LAGS_FROM_S
        return self._lags and self.max_delay_s > 0

    def hold(self, send: Callable[[], None]) -> None:
        """`send`, which sends a stream's text, will be called in `max_delay_s` or sooner."""
        if not self._held:
            asyncio.get_running_loop().call_later(self.max_delay_s, self.flush)
        self._held.append(send)

    def flush(self) -> None:
        """Sends all that waits."""
        held, self._held = self._held, []
        for send in held:
            send()
