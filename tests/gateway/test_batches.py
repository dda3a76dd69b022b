"""Batches by the official client: upload, work, results, faults, cancel."""

import httpx
import openai
import pytest
from openai import OpenAI

from tests.batches import CHAT, client_of, ended, line, lines_of, start
from tests.conftest import MODEL, Server, poll


def test_a_batch_with_good_and_bad_requests(stub: Server) -> None:
    """Each request is answered once: the good ones in one file, the refused ones in another."""
    client = client_of(stub)
    before = stub.metric("lapilli_batch_lines_total")
    ttft = stub.metric("lapilli_time_to_first_token_seconds_count")
    good = [line(f"r{number}") for number in range(26)]
    bad = [
        line("hot", temperature=9),
        line("stream", stream=True),
        line("model", model="other"),
        line("none", messages=[]),
    ]
    batch = start(client, good + bad)
    assert batch.status == "validating"
    batch = ended(client, batch.id, "completed", "failed")
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 30, 26, 4)
    done, refused = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert [one["custom_id"] for one in done] == [f"r{number}" for number in range(26)]
    for one in done:
        assert one["response"]["status_code"] == 200
        assert one["error"] is None
        assert one["response"]["body"]["usage"]["completion_tokens"] == 5
    direct = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say r3"}], max_tokens=5
    )
    assert (
        done[3]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    )
    codes = {one["custom_id"]: one["response"]["status_code"] for one in refused}
    assert codes == {"hot": 400, "stream": 400, "model": 404, "none": 400}
    assert refused[0]["response"]["body"]["error"]["param"] == "temperature"
    poll(lambda: stub.metric("lapilli_batch_lines_total") == before + 30, "lines counted")
    assert stub.metric("lapilli_time_to_first_token_seconds_count") <= ttft + 1  # the direct request's
    assert stub.metric("lapilli_batch_lines_in_flight") == 0
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    assert {batch.output_file_id, batch.input_file_id} <= {one.id for one in client.files.list(limit=10)}
    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_an_input_with_faults_fails_as_a_whole(stub: Server) -> None:
    """Duplicates and lines that are no request are told by their numbers, and nothing is worked on."""
    client = client_of(stub)
    batch = start(client, [line("a"), b"{", b"", line("a"), line("b").replace(b"POST", b"GET")])
    batch = ended(client, batch.id, "failed", "completed")
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert [(fault.code, fault.line) for fault in batch.errors.data] == [
        ("invalid_json_line", 2), ("duplicate_custom_id", 4), ("invalid_method", 5)
    ]  # fmt: skip
    assert batch.output_file_id is None
    assert batch.request_counts
    assert batch.request_counts.total == 0


def test_cancel_keeps_what_is_done(stub: Server) -> None:
    """Running requests are aborted; each request stands in one of the files."""
    client = client_of(stub)
    slow = [line(f"s{number}", max_tokens=20_000, ignore_eos=True) for number in range(3)]
    batch = start(client, [line("quick"), *slow])
    poll(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed == 1, "first done", 30)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id, "cancelled")
    assert [one["custom_id"] for one in lines_of(client, batch.output_file_id)] == ["quick"]
    undone = lines_of(client, batch.error_file_id)
    assert [one["custom_id"] for one in undone] == ["s0", "s1", "s2"]
    assert {one["error"]["code"] for one in undone} == {"batch_cancelled"}
    poll(stub.drained, "aborted in the engine")


def test_another_tenant_finds_nothing(stub: Server) -> None:
    """Files and batches belong to the tenant that made them."""
    stub.cli("tenants", "create", "stranger")
    made = stub.cli("keys", "create", "--name", "s", "--tenant", "stranger")
    key = next(word for word in made.split() if word.startswith("lapilli_"))
    client, stranger = client_of(stub), OpenAI(base_url=f"{stub.url}/v1", api_key=key, max_retries=0)
    batch = start(client, [line("a")])
    for call in (
        lambda: stranger.batches.retrieve(batch.id),
        lambda: stranger.batches.cancel(batch.id),
        lambda: stranger.files.retrieve(batch.input_file_id),
        lambda: stranger.files.content(batch.input_file_id),
        lambda: stranger.files.delete(batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        stranger.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert not stranger.batches.list().data
    assert not stranger.files.list().data
    ended(client, batch.id, "completed")


def test_uploads_that_are_refused(stub: Server) -> None:
    """Forms of the wrong shape are 4xx; a file may be larger than other bodies."""
    with stub.client() as client:
        big = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b", b"x" * (2 * 2**20))})
        assert big.status_code == 200, big.text
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answers: list[httpx.Response] = [
            client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b", b"")}),
            client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("b", b"x")}),
            client.post("/v1/files", data={"purpose": "batch"}, files={"other": ("b", b"x")}),
            client.post("/v1/files", headers=headers, content=b"--x\r\nnothing"),
            client.post("/v1/files", headers={"Content-Type": "multipart/form-data"}, content=b"x"),
            client.post("/v1/files", json={}),
            client.get("/v1/files/%00"),
            client.get("/v1/files?limit=0"),
            client.get("/v1/batches?after=nothing"),
            client.post(
                "/v1/batches", json={"input_file_id": "\0", "endpoint": CHAT, "completion_window": "24h"}
            ),
            client.post("/v1/batches", json={"input_file_id": big.json()["id"], "endpoint": "/v1/models"}),
        ]
    assert [answer.status_code for answer in answers] == [400] * 5 + [415, 404, 400, 400, 400, 400]
    for answer in answers:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
