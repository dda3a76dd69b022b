"""Servers over tiny models with random weights, each started once."""

import json
from collections.abc import Iterator

import pytest

from tests.conftest import Server, running
from tests.models import embedding_model, tools_model


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of Qwen3's family: it reasons, and calls tools; two LoRA adapters."""
    folder = tools_model(tmp_path_factory.mktemp("models") / "tools")
    adapters = json.dumps({name: str(folder / name) for name in ("first", "second")})
    flags = (
        "--model",
        str(folder),
        "--engine.lora_adapters",
        adapters,
        "--engine.kv_cache_memory_gib",
        "0.25",
    )
    with running(tmp_path_factory.mktemp("tools"), *flags) as server:
        yield server


@pytest.fixture(scope="session")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A mixture of experts that makes embeddings."""
    folder = embedding_model(tmp_path_factory.mktemp("models") / "embed")
    flags = (
        "--model",
        str(folder),
        "--engine.args",
        '{"runner": "pooling"}',
        "--engine.kv_cache_memory_gib",
        "0.25",
    )
    with running(tmp_path_factory.mktemp("embed"), *flags) as server:
        yield server
