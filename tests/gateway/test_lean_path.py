"""The lean token path against vLLM's own, byte for byte, on the same outputs."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import Settings
from server.context import RequestContext
from server.engine import build
from server.sections import StubSettings

TRIES = 5
"""vLLM's path joins the tokens of steps that it comes late to; a real difference is there each time."""
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "usage off": {"stream_options": {"include_usage": False}},
    "one token": {"max_tokens": 1},
    "natural end": {"max_tokens": None},
    "stop string": {"stop": ["water", "river", "a"]},
    "stop string kept": {"stop": ["water", "river"], "include_stop_str_in_output": True},
    "temperature and seed": {"temperature": 0.5, "seed": 7, "top_p": 0.9},
    "system message": {"messages": [{"role": "system", "content": "é 🦀"}, {"role": "user", "content": "x"}]},
}
NOT_PLAIN: dict[str, dict[str, Any]] = {
    "two choices": {"n": 2},
    "logprobs": {"logprobs": True},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token ids": {"return_token_ids": True},
    "echo": {"echo": True},
}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WITH_PARSER: dict[str, dict[str, Any]] = {
    "natural end": BODIES["natural end"],
    "stop string": BODIES["stop string"],
    "tools": {"tools": [TOOL]},
    "tools not to be called": {"tools": [TOOL], "tool_choice": "none"},
}


async def _bytes(protocol: Any, engine: Any, body: dict[str, Any], *, lean: bool) -> tuple[bytes, bool]:
    protocol.lean = lean
    ctx = RequestContext("POST", "/v1/chat/completions")
    engine.track(ctx)
    events = await protocol.chat(json.dumps(body).encode(), ctx)
    stream = b"".join([event async for event in events])
    stream = re.sub(rb'"created":\d+', b'"created":0', stream.replace(ctx.id.encode(), b"ID"))
    return stream, ctx.lean


async def _both_ways(folder: Path) -> dict[str, tuple[bytes, bytes, bool]]:
    from server.engine.client import Engine
    from server.engine.core import EngineCore
    from server.engine.stub_model import write_stub_model
    from server.protocol.serving import OpenAIProtocol

    # At 30 tokens/s each step is one frame on either path, but for a machine that is very busy (TRIES).
    stub = StubSettings(tokens_per_s=30, output_tokens=8)
    tree = Settings(engine={"kind": "stub", "tool_parser": "none"}, stub=stub)  # type: ignore[arg-type]
    config = build.vllm_config(tree, str(write_stub_model(folder, stub.max_model_len)))
    core = EngineCore(tree, config)
    engine = Engine(tree, config, on_gap=lambda *_: None)
    try:
        (addresses,) = await asyncio.to_thread(core.start, 1)
        protocol = OpenAIProtocol(await engine.attach(addresses), tree)
        engine.become_ready()
        found = {}
        for name, change in (BODIES | NOT_PLAIN).items():
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 6, "stream": True} | change
            for _ in range(TRIES):
                reference, _ = await _bytes(protocol, engine, body, lean=False)
                ours, lean = await _bytes(protocol, engine, body, lean=True)
                if ours == reference:
                    break
            found[name] = (reference, ours, lean)
        with_parser = OpenAIProtocol(engine.llm, Settings(engine={"kind": "stub"}, stub=stub))  # type: ignore[arg-type]
        for name, change in WITH_PARSER.items():
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 6, "stream": True} | change
            reference = found[name][0] if name in found else b""
            for _ in range(TRIES):
                ours, lean = await _bytes(with_parser, engine, body, lean=True)
                if ours == reference:
                    break
            found[f"{name}, parser"] = (reference, ours, lean)
        assert not engine.llm or not engine.llm.output_processor.request_states
        return found
    finally:
        engine.close()
        core.stop()


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes, bool]]:
    """For each body: vLLM's bytes, ours, and whether ours took the lean path."""
    before = dict(os.environ)
    build.prepare_environment(Settings())
    found = asyncio.run(_both_ways(tmp_path_factory.mktemp("model")))
    os.environ.clear()
    os.environ.update(before)
    return found


@pytest.mark.parametrize("name", BODIES)
def test_same_bytes(both_ways: dict[str, tuple[bytes, bytes, bool]], name: str) -> None:
    """Ids and times aside, the client can't tell the paths apart."""
    reference, ours, lean = both_ways[name]
    assert lean
    assert reference.count(b"data: ") > 2
    assert ours == reference


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_the_rest_is_left_to_vllm(both_ways: dict[str, tuple[bytes, bytes, bool]], name: str) -> None:
    """Anything but the text of one choice takes vLLM's loop."""
    reference, ours, lean = both_ways[name]
    assert not lean
    # Two choices of one step come in either order.
    assert sorted(ours.split(b"\n\n")) == sorted(reference.split(b"\n\n"))


@pytest.mark.parametrize("name", WITH_PARSER)
def test_a_parser_of_tool_calls_is_not_asked_without_tools(
    both_ways: dict[str, tuple[bytes, bytes, bool]], name: str
) -> None:
    """A chat without tools is plain on a model that could call some: the same bytes as without a parser."""
    reference, ours, lean = both_ways[f"{name}, parser"]
    assert lean == (name in BODIES)
    assert not lean or ours == reference


@settings(deadline=None)  # the first example imports vLLM
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_is_escaped_as_pydantic_does(text: str) -> None:
    """Quotes, control characters, other planes: our frame equals the dumped chunk."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage

    from server.protocol.frames import ChatFrames

    frames = ChatFrames("m", None).stream("chatcmpl-1", 7, usage=False)
    assert DeltaMessage(content=text).model_dump_json(exclude_unset=True).encode() in frames.text(text)
