"""Short prompts are rendered on the event loop, long ones in vLLM's thread, a few at a time.

vLLM hands each chat template and each tokenisation to a thread (vllm/renderers/base.py). For a short prompt
that costs more than the work itself: two hops, each with a wait for the interpreter's lock while the loop is
busy. A long prompt would hold up every other stream for longer than that.

vLLM's limit on the time of a chat template (VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT, 30 s) runs while the template
waits for the thread: of many long prompts that come together the later ones would fail, and each failure adds
a thread. So they wait here, in the order of their coming, before that time begins.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

SHORT_CHARS = 4096
"""Characters of text that are rendered on the loop: some hundred microseconds of work."""
LONG_AT_A_TIME = 2
"""One in its chat template while the other is tokenised."""


class ShortOnLoop(Executor):
    """Runs short work at once, in the caller's thread, and hands the rest to `pool`."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """As Executor.submit; vLLM passes `fn` as a partial without further arguments."""
        if not (isinstance(fn, partial) and _is_short(fn.args)):
            return self._pool.submit(fn, *args, **kwargs)
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the pool."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)


def _is_short(args: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of vLLM's `_tokenize_prompt` or chat template, with little text."""
    match args:
        case ({"prompt": str(text)}, _):
            return len(text) <= SHORT_CHARS
        case (_, _, [*messages]):
            return _chars(messages) <= SHORT_CHARS
    return False


def _chars(messages: list[Any]) -> int:
    """Characters of all messages; more than any limit where one is not plain text."""
    total = 0
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                total += len(value)
            elif value is not None:
                return SHORT_CHARS + 1
    return total


def tame(renderer: Any) -> None:
    """Makes `renderer` (vLLM's) do so. It keeps its pool's life and its replacement after a time-out."""
    executor = renderer._executor
    executor._inner = ShortOnLoop(executor._inner)
    render_chat = renderer.render_chat_async
    door = asyncio.Semaphore(LONG_AT_A_TIME)

    async def bounded(conversations: Any, *args: Any, **kwargs: Any) -> Any:
        if all(_chars(messages) <= SHORT_CHARS for messages in conversations):
            return await render_chat(conversations, *args, **kwargs)
        async with door:
            return await render_chat(conversations, *args, **kwargs)

    renderer.render_chat_async = bounded
