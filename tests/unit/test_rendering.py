"""Short prompts are rendered in the caller's thread, long ones in the pool, with the same results."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from server.engine.rendering import SHORT_CHARS, ShortOnLoop


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
