"""Short prompts are rendered in the caller's thread, long ones in the pool, a few at a time."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from server.engine.rendering import LONG_AT_A_TIME, SHORT_CHARS, ShortOnLoop, tame


def _thread_of(*_args: Any) -> int:
    return threading.get_ident()


def _fails(*_args: Any) -> None:
    raise ValueError("no")


LONG = "x" * (SHORT_CHARS + 1)
MESSAGE = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("args", "here"),
    [
        (({"prompt": "hello"}, "params"), True),
        (({"prompt": LONG}, "params"), False),
        (("config", "tokenizer", [MESSAGE, MESSAGE]), True),
        (("config", "tokenizer", [MESSAGE, {"role": "user", "content": LONG}]), False),
        (("config", "tokenizer", [{"role": "user", "content": [{"type": "text", "text": LONG}]}]), False),
        (([1, 2, 3],), False),
    ],
)
def test_where_it_runs(args: tuple[Any, ...], here: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = ShortOnLoop(pool).submit(partial(_thread_of, *args))
        assert (done.result(10) == threading.get_ident()) is here


@pytest.mark.parametrize("text", ["hello", LONG])
def test_errors_are_kept(text: str) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="no"):
        ShortOnLoop(pool).submit(partial(_fails, {"prompt": text}, None)).result(10)


class _Renderer:
    """Counts how many of its conversations are rendered side by side."""

    def __init__(self) -> None:
        self._executor = type("Executor", (), {"_inner": None})()
        self.inside = self.most = 0

    async def render_chat_async(self, conversations: list[Any], _params: str) -> list[Any]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.001)
        self.inside -= 1
        return conversations


@pytest.mark.parametrize(("text", "most"), [(LONG, LONG_AT_A_TIME), ("hello", 50)])
def test_long_prompts_wait_for_their_turn(text: str, most: int) -> None:
    """In order, and before vLLM's limit on the time of a chat template begins to run."""

    async def together() -> tuple[list[int], int]:
        renderer = _Renderer()
        tame(renderer)
        ended: list[int] = []

        async def one(number: int) -> None:
            await renderer.render_chat_async([[{"role": "user", "content": text}]], "params")
            ended.append(number)

        await asyncio.gather(*(one(number) for number in range(50)))
        return ended, renderer.most

    ended, seen = asyncio.run(together())
    assert ended == list(range(50))
    assert seen == most
