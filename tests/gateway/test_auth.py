"""API keys over HTTP."""

import http.client
import json
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import Server, poll

NO_KEY_PATHS = ["/health", "/livez", "/readyz", "/metrics"]


def _status(server: Server, *headers: tuple[str, bytes]) -> tuple[int, http.client.HTTPMessage]:
    """Status of GET /v1/models with these raw headers."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.putrequest("GET", "/v1/models")
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    if answer.status != 400:  # 400 is the HTTP parser's own
        body = json.loads(answer.read())
        assert ("error" in body) == (answer.status != 200)
    return answer.status, answer.headers


def test_spellings(stub: Server) -> None:
    """Case O16: any case of the scheme is good, every bad form is 401 with a challenge, nothing is 500."""
    good = stub.key.encode()
    fine: list[tuple[tuple[str, bytes], ...]] = [
        (("Authorization", b"Bearer " + good),),
        (("Authorization", b"bearer " + good),),
        (("Authorization", b"BEARER " + good),),
        (("X-API-Key", good),),
        (("Authorization", b"Bearer " + good), ("X-API-Key", good)),
    ]
    bad: list[tuple[tuple[str, bytes], ...]] = [
        (),
        (("Authorization", b"Bearer"),),
        (("Authorization", b"Bearer "),),
        (("Authorization", b"Bearer \xe9"),),
        (("Authorization", "Bearer “key”".encode()),),
        (("Authorization", b"Basic " + good),),
        (("Authorization", good),),
        (("Authorization", b"Bearer " + good[:-1] + b"!"),),
        (("Authorization", b"Bearer " + b"x" * 30_000),),
        (("Authorization", b"Bearer " + good), ("Authorization", b"Bearer " + good)),
        (("Authorization", b"Bearer wrong"), ("X-API-Key", good)),
        (("Authorization", b"Bearer " + good), ("X-API-Key", b"wrong")),
    ]
    assert [_status(stub, *headers)[0] for headers in fine] == [200] * len(fine)
    for headers in bad:
        status, answer = _status(stub, *headers)
        assert status == 401, headers
        assert answer["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", NO_KEY_PATHS)
def test_probes_need_no_key(stub: Server, path: str) -> None:
    """Probes and scrapers work without a key."""
    assert httpx.get(stub.url + path).status_code == 200


def test_key_is_checked_before_the_body_is_read(stub: Server) -> None:
    """Without a key a wrong body is 401, not 400."""
    assert httpx.post(f"{stub.url}/v1/chat/completions", content=b"{bad").status_code == 401


def test_created_and_revoked_by_the_command_line(stub: Server) -> None:
    """A running server sees both: a new key at once, a revoked one within auth.refresh_s."""
    made = json.loads(stub.cli("keys", "create", "--name", "ci", "--json"))
    header = ("X-API-Key", made["key"].encode())
    assert _status(stub, header)[0] == 200
    stub.cli("keys", "revoke", made["id"])
    poll(lambda: _status(stub, header)[0] == 401, "revoked key refused")


def test_no_key_and_no_prompt_in_the_log(stub: Server) -> None:
    """The key is printed once at first start, and appears in no later line; prompts never do."""
    marker = "needle-7f3a"
    with stub.client() as client:
        client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": marker}], "max_tokens": 1}
        )
        client.post("/v1/chat/completions", json={"messages": [{"role": marker, "content": marker}]})
    log_lines = [line for line in stub.text.splitlines() if line.startswith("{")]
    assert log_lines
    assert not [line for line in log_lines if stub.key in line or marker in line]
