"""The lean path's sink under every order of tokens, full connections, lag and flushes."""

import asyncio
import json
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl

from server.context import RequestContext
from server.streaming import EventStream

TEXTS = st.lists(st.text(alphabet="aé🦀", max_size=2), min_size=1, max_size=8)
ACTIONS = st.lists(
    st.sampled_from(["token", "token", "late token", "flush", "pause", "resume", "loop"]), max_size=30
)


class Connection:
    """uvicorn's `send` as far as it matters: it waits while the transport is full, then writes."""

    def __init__(self) -> None:
        transport: Any = SimpleNamespace(pause_reading=lambda: None, resume_reading=lambda: None)
        self.flow = FlowControl(transport)
        self.written: list[bytes] = []
        self.ended = 0

    async def send(self, message: Any) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        if message["type"] == "http.response.body":
            self.written.append(message["body"])
            self.ended += not message["more_body"]


class LeanRun:
    """One lean stream without an engine: tokens are handed to its sink by hand."""

    def __init__(self, *, frame_by_frame: bool = False) -> None:
        from server.engine.pace import OutputPace
        from server.engine.sink import TokenSink
        from server.engine.times import TokenTimes
        from server.protocol.frames import ChatFrames
        from server.protocol.lean import _lean_events

        self.connection = Connection()
        self.ctx = RequestContext("POST", "/v1/chat/completions", send=self.connection.send)
        # A delay that does not run out by itself: the actions decide when text is flushed.
        self.pace = OutputPace(0.0 if frame_by_frame else 1000.0, lambda _lag_s: None)
        times = TokenTimes(self.ctx, lambda *_: None, streamed=True)
        self.sink = TokenSink(self.ctx, times, self.pace)
        self._text = ""
        self._step = 0
        self.stats = SimpleNamespace(last_token_ts=0.0, scheduled_ts=0.0, first_token_ts=0.0)
        detokenizer = SimpleNamespace(get_next_output_text=lambda *_: self._text)
        self.sink.attach(SimpleNamespace(prompt_len=3, detokenizer=detokenizer, stats=self.stats))
        self.frames = ChatFrames("m", None).stream("id", 7, usage=True)
        request: Any = SimpleNamespace(send=self._send, abort=self._abort)
        self.events = _lean_events(request, self.frames)
        self.aborted = 0

    async def _send(self) -> Any:
        return self.sink

    async def _abort(self) -> None:
        self.aborted += 1

    def token(self, text: str, *, late: bool = False, finish: str | None = None) -> None:
        """One token of one engine step; a late one comes long after the step."""
        self._text = text
        self._step += 1
        # Monotonic time of the step: long ago, or ahead of any clock.
        self.stats.last_token_ts = self._step * 1e-9 if late else 1e12 + self._step
        self.sink.take([1], None, finish, None)

    def respond(self) -> Awaitable[None]:
        """Serves the stream on the connection."""

        async def receive() -> Any:
            await asyncio.Event().wait()

        response = EventStream(self.ctx, self.events, ping=1000, sep="\n")
        return response({"type": "http", "method": "POST"}, receive, self.connection.send)


def _contents(stream: bytes) -> list[str]:
    events = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]


async def _settle() -> None:
    """Lets every task that can run get to where it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _play(texts: list[str], actions: list[str]) -> LeanRun:
    run = LeanRun()
    serving = asyncio.ensure_future(run.respond())
    tokens = iter(texts[:-1])
    for action in actions:
        if action in ("token", "late token") and (text := next(tokens, None)) is not None:
            run.token(text, late=action == "late token")
        elif action == "flush":
            run.pace.flush()
        elif action == "pause":
            run.connection.flow.pause_writing()
        elif action == "resume":
            run.connection.flow.resume_writing()
        else:
            await _settle()
    for text in tokens:
        run.token(text)
    run.token(texts[-1], finish="stop")
    run.connection.flow.resume_writing()
    await serving
    return run


@settings(deadline=None, max_examples=200)
@given(TEXTS, ACTIONS)
def test_nothing_is_lost_or_reordered(texts: list[str], actions: list[str]) -> None:
    """Any order of tokens, lag, flushes and pauses: the same text, the end last, one [DONE]."""
    run = asyncio.run(_play(texts, actions))
    stream = b"".join(run.connection.written)
    assert "".join(_contents(stream)) == "".join(texts)
    assert stream.startswith(run.frames.role)
    assert stream.count(b"[DONE]") == 1
    assert stream.endswith(run.frames.usage_chunk(3, len(texts)) + b"data: [DONE]\n\n")
    assert stream.count(b'"finish_reason":"stop"') == 1
    assert (run.connection.ended, run.aborted) == (1, 1)
    assert run.ctx.write is None


def test_a_frame_a_token_without_a_task() -> None:
    """Once the stream has begun, a token is on the wire when the engine's pass returns."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        await _settle()
        run.token("one")
        await _settle()
        for text in ("two", "three"):
            run.token(text)
            assert run.connection.written[-1] == run.frames.text(text)
        run.token("four", finish="length")
        await serving

    asyncio.run(play())


def test_full_connection_joins_text() -> None:
    """While the client does not read, text gathers, and goes out as one frame when it does."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        run.token("a")
        await _settle()
        run.connection.flow.pause_writing()
        for text in "bcd":
            run.token(text)
            await _settle()
        assert len(run.connection.written) == 1
        run.connection.flow.resume_writing()
        await _settle()
        assert _contents(b"".join(run.connection.written)) == ["", "a", "b", "cd"]
        run.token("e", finish="stop")
        await serving

    asyncio.run(play())


@pytest.mark.parametrize("late", [False, True])
def test_lag_holds_text_back(late: bool) -> None:
    """Late text waits for the flush; text in time never does."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        run.token("a", late=late)
        await _settle()
        run.token("b", late=late)
        run.token("c", late=late)
        assert len(run.connection.written) == (1 if late else 3)
        run.pace.flush()
        contents = _contents(b"".join(run.connection.written))
        assert contents == (["", "a", "bc"] if late else ["", "a", "b", "c"])
        run.token("", finish="stop")
        await serving

    asyncio.run(play())


def test_no_delay_no_holding() -> None:
    """`coalesce_max_delay_ms: 0` means a frame for each token, however late."""

    async def play() -> None:
        run = LeanRun(frame_by_frame=True)
        serving = asyncio.ensure_future(run.respond())
        for text in "abc":
            run.token(text, late=True)
            await _settle()
        assert _contents(b"".join(run.connection.written)) == ["", "a", "b", "c"]
        run.token("", late=True, finish="stop")
        await serving

    asyncio.run(play())


def test_a_broken_connection_ends_its_stream_alone() -> None:
    """An error of `send` never reaches the engine's pass over all requests."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        run.token("a")
        await _settle()

        async def broken(_message: Any) -> None:
            raise RuntimeError("no connection")

        run.ctx.write = run.ctx.write and type(run.ctx.write)(run.ctx.write.func, broken)  # type: ignore[attr-defined]
        run.token("b")  # raises nothing, and goes the other way
        await _settle()
        run.token("c", finish="stop")
        await serving
        assert "".join(_contents(b"".join(run.connection.written))) == "abc"

    asyncio.run(play())


@pytest.mark.parametrize("full", [False, True])
def test_client_that_leaves(full: bool) -> None:
    """The request is given up once, and later tokens find no connection to write to."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        run.token("a")
        await _settle()
        if full:
            run.connection.flow.pause_writing()
            run.token("b")
            await _settle()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        before = len(run.connection.written)
        run.token("c")
        run.pace.flush()
        assert (len(run.connection.written), run.aborted, run.ctx.write) == (before, 1, None)

    asyncio.run(play())


def test_engine_abort_ends_the_stream() -> None:
    """What vLLM's output pass says of an aborted request is its last chunk."""

    async def play() -> None:
        run = LeanRun()
        serving = asyncio.ensure_future(run.respond())
        run.token("a")
        await _settle()
        run.sink.take([], None, "abort", None)
        await serving
        assert b'"finish_reason":"abort"' in b"".join(run.connection.written)

    asyncio.run(play())


def test_the_engines_death_comes_after_the_text() -> None:
    """What was said is delivered, then the error; and the request is given up."""

    async def play() -> None:
        run = LeanRun()
        assert run.ctx.write is None
        run.token("a")
        assert await anext(run.events) == run.frames.role + run.frames.text("a")
        run.token("b")
        run.sink.put(RuntimeError("dead"))
        assert await anext(run.events) == run.frames.text("b")
        with pytest.raises(RuntimeError, match="dead"):
            await anext(run.events)
        assert run.aborted == 1

    asyncio.run(play())
