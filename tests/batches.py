"""Batches by the official client."""

import json

import openai
from openai import OpenAI

from tests.conftest import Server, poll

CHAT = "/v1/chat/completions"


def line(custom_id: str, *, max_tokens: int = 5, **body: object) -> bytes:
    """One request of a batch."""
    chat = {"messages": [{"role": "user", "content": f"say {custom_id}"}], "max_tokens": max_tokens} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": chat}).encode()


def client_of(server: Server) -> OpenAI:
    """The official client."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)


def start(client: OpenAI, lines: list[bytes]) -> openai.types.Batch:
    """A batch of `lines`."""
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def ended(client: OpenAI, batch_id: str, *statuses: str, limit_s: float = 30) -> openai.types.Batch:
    """The batch, once it has one of the statuses."""
    poll(lambda: client.batches.retrieve(batch_id).status in statuses, f"{batch_id} {statuses}", limit_s)
    return client.batches.retrieve(batch_id)


def lines_of(client: OpenAI, file_id: str | None) -> list[dict]:
    """A file of results."""
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()] if file_id else []
