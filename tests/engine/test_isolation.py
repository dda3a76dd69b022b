"""Tenants do not share the prefix cache (case O29): with the control that the same tenant does hit it."""

import json
import random

import httpx
import pytest

from tests.conftest import Server, poll

BLOCK_TOKENS = 128
"""vLLM's block on CPU: only whole blocks are cached."""
NUM_PROMPTS = 30
PROMPT_TOKENS = BLOCK_TOKENS + 8
FIRST_WORD_ID, VOCABULARY = 20, 49152

pytestmark = pytest.mark.engine


def _key(server: Server, tenant: str, *flags: str) -> str:
    server.cli("tenants", "create", tenant, *flags)
    return str(json.loads(server.cli("keys", "create", "--tenant", tenant, "--json"))["key"])


def _cached_tokens(server: Server, key: str, path: str, body: dict[str, object]) -> int:
    """Sends `body`; how many of its prompt tokens came from the prefix cache."""
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    queries, hits = map(server.metric, names)
    answer = httpx.post(server.url + path, json=body, headers={"X-API-Key": key}, timeout=200)
    assert answer.status_code == 200, answer.text
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert num_tokens > BLOCK_TOKENS
    poll(lambda: server.metric(names[0]) == queries + num_tokens, "the look-ups are counted")
    return int(server.metric(names[1]) - hits)


def test_no_tenant_gets_hits_from_another(real: Server) -> None:
    """Thirty random prompts: A hits its own, B none, C in A's group hits; a body's salt is ignored."""
    key_a = _key(real, "tenant-a", "--cache-group", "team")
    key_b = _key(real, "tenant-b")
    key_c = _key(real, "tenant-c", "--cache-group", "team")
    numbers = random.Random(29)
    prompts = [
        [numbers.randrange(FIRST_WORD_ID, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(NUM_PROMPTS)
    ]
    body: dict[str, object] = {"prompt": prompts, "max_tokens": 1}

    def cached(key: str, **more: str) -> int:
        return _cached_tokens(real, key, "/v1/completions", body | more)

    assert cached(key_a) == 0
    assert cached(key_a) == NUM_PROMPTS * BLOCK_TOKENS, "the control: the cache works"
    assert cached(key_b) == 0
    assert cached(key_b, cache_salt="x") == NUM_PROMPTS * BLOCK_TOKENS, "B's own by now"
    assert cached(key_c) == NUM_PROMPTS * BLOCK_TOKENS, "a group shares"


def test_chats_are_apart_too(real: Server) -> None:
    """The same by way of chat messages."""
    keys = [_key(real, name) for name in ("chat-a", "chat-b")]
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "seven wet cats sat on one mat and " * 20}],
        "max_tokens": 1,
    }

    def cached(key: str) -> int:
        return _cached_tokens(real, key, "/v1/chat/completions", body)

    assert cached(real.key) == 0
    assert cached(real.key) >= BLOCK_TOKENS
    assert cached(keys[0]) == 0
    assert cached(keys[0]) >= BLOCK_TOKENS
    assert cached(keys[1]) == 0
