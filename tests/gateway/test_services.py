"""Services, tokens and the admin API over HTTP: one server with two workers over the stub engine."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from tests.conftest import MODEL, Server, poll, running
from tests.oidc import Issuer, jwk, rsa_key, running_issuer

TOKEN = "admin-credential-of-the-tests"
FIRST, SECOND = rsa_key(), rsa_key()
BODY = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
SERVICES = """
services:
  - {name: poems, model: poet, limits: {requests_per_min: 1000}}
  - {name: sso, auth: jwt, scopes: [chat:write]}
  - {name: open, auth: none, endpoint: /public, model: MODEL}
""".replace("MODEL", MODEL)


@dataclass
class Site:
    """The server and what is around it."""

    server: Server
    issuer: Issuer
    file: Path

    def post(self, prefix: str, key: str | None = None, body: Any = None) -> httpx.Response:
        """A chat request below an endpoint."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.server.url}{prefix}/v1/chat/completions"
        return httpx.post(url, json=BODY | (body or {}), headers=headers, timeout=30)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the admin API that works."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.request(
            method, f"{self.server.admin_url}/admin{path}", json=body, headers=headers, timeout=30
        )
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def token(self, key: Any = FIRST, kid: str = "k1", **claims: Any) -> str:
        """A token of the issuer."""
        made = {
            "iss": self.issuer.url,
            "aud": "lapilli",
            "sub": "user",
            "tenant": "acme",
            "scope": "chat:write",
        }
        now = {"exp": int(time.time()) + 600}
        return jwt.encode(made | now | claims, key, "RS256", headers={"kid": kid})


@contextmanager
def _site(folder: Path) -> Iterator[Site]:
    file, token, adapter = folder / "services.yaml", folder / "token", folder / "poet"
    file.write_text(SERVICES)
    token.write_text(TOKEN)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 4}')  # the stub reads no more of it
    with running_issuer() as issuer:
        issuer.keys = [jwk(FIRST, "k1")]
        with running(
            folder / "state", "--engine", "stub", "--stub.tokens_per_s", "500", "--gateway.workers", "2",
            "--limits.store", "none",
            "--served-model-name", MODEL, "--auth.services_file", str(file), "--admin.token_file", str(token),
            "--engine.lora_adapters", json.dumps({"poet": str(adapter)}),
            "--jwt.issuer", issuer.url, "--jwt.audience", "lapilli", "--jwt.jwks_cooldown_s", "0.5",
        ) as server:  # fmt: skip
            yield Site(server, issuer, file)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The one site of this file, with the tenant `acme`."""
    with _site(tmp_path_factory.mktemp("site")) as found:
        found.admin("POST", "/tenants", {"name": "acme"})
        yield found


def test_services_over_the_model_and_its_adapter(site: Site) -> None:
    """Each endpoint offers its model, under its own name too, whole and streamed; no other."""
    key = site.server.key
    base, poem = site.post("", key), site.post("/services/poems", key)
    assert (base.json()["model"], poem.json()["model"]) == (MODEL, "poet")
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (base, poem)]
    assert texts[0] != texts[1], "the adapter's answer is its own"
    assert site.post("", key, {"model": "poet"}).json()["choices"][0]["message"]["content"] == texts[1]
    for name, status in ((MODEL, 404), ("poet", 200), ("poems", 200), ("x", 404)):
        assert site.post("/services/poems", key, {"model": name}).status_code == status
    streamed = site.post("/services/poems", key, {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {"poet"}
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == texts[1]
    names = {
        prefix: [
            m["id"]
            for m in httpx.get(f"{site.server.url}{prefix}/v1/models", headers={"X-API-Key": key}).json()[
                "data"
            ]
        ]
        for prefix in ("", "/services/poems", "/public")
    }
    assert names == {"": [MODEL, "poet"], "/services/poems": ["poet"], "/public": [MODEL]}
    tokens = httpx.post(
        f"{site.server.url}/services/poems/tokenize", json={"prompt": "a b"}, headers={"X-API-Key": key}
    )
    assert tokens.status_code == 200
    assert (
        httpx.get(f"{site.server.url}/services/none/v1/models", headers={"X-API-Key": key}).status_code == 404
    )


def test_who_may_call_which_service(site: Site) -> None:
    """Keys, tokens, scopes, none; 401 and 403 with their challenges."""
    only = site.admin("POST", "/keys", {"name": "only", "services": ["poems"]})["key"]
    assert site.post("/services/poems", only).status_code == 200
    refused = site.post("", only)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "service_not_allowed")
    assert refused.json()["error"]["type"] == "permission_error"
    assert site.post("/services/sso", site.server.key).status_code == 401
    assert site.post("/services/sso", site.token()).status_code == 200
    assert site.post("", site.token()).status_code == 200, "the plain paths take both"
    assert site.post("/services/poems", site.token()).status_code == 401
    narrow = site.post("/services/sso", site.token(scope="other"))
    assert narrow.status_code == 403
    assert narrow.headers["WWW-Authenticate"] == 'Bearer error="insufficient_scope", scope="chat:write"'
    expired = site.post("/services/sso", site.token(exp=1))
    assert expired.status_code == 401
    assert expired.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    assert site.post("/services/sso", site.token(tenant="nobody")).status_code == 403
    assert site.post("/public").status_code == 200
    assert site.post("/public", "nonsense").status_code == 200


def test_rotated_signing_key_over_http(site: Site) -> None:
    """Case O18 over both workers: the new key works at the first or second try, a flood costs few fetches."""
    site.issuer.keys = [jwk(FIRST, "k1"), jwk(SECOND, "k2")]
    with httpx.Client(base_url=site.server.url) as client:
        for key, kid in ((SECOND, "k2"), (FIRST, "k1")):
            headers = {"Authorization": f"Bearer {site.token(key, kid)}"}
            poll(lambda headers=headers: client.get("/v1/models", headers=headers).status_code == 200, kid)
        before = site.issuer.fetches
        started = time.monotonic()
        for number in range(100):
            headers = {"Authorization": f"Bearer {site.token(SECOND, f'made-up-{number}')}"}
            assert client.get("/v1/models", headers=headers).status_code == 401
        cool_downs = (time.monotonic() - started) / 0.5
        assert site.issuer.fetches - before <= 2 * (cool_downs + 1)


def test_changes_reach_both_workers(site: Site) -> None:
    """A revoked key, a rotated one, a disabled tenant: refused by every worker within seconds."""
    made = site.admin("POST", "/keys", {"tenant": "acme"})
    rotating = site.admin("POST", "/keys", {"tenant": "acme"})
    spared = site.admin("POST", "/keys", {"tenant": "default"})["key"]

    def statuses(key: str) -> set[int]:
        return {
            httpx.get(f"{site.server.url}/v1/models", headers={"X-API-Key": key}).status_code
            for _ in range(12)
        }

    assert statuses(made["key"]) == statuses(rotating["key"]) == {200}
    site.admin("POST", f"/keys/{made['id']}/revoke")
    new = site.admin("POST", f"/keys/{rotating['id']}/rotate", {"overlap_s": 0})
    poll(lambda: statuses(made["key"]) == {401}, "revoked everywhere", 5)
    poll(lambda: statuses(rotating["key"]) == {401}, "the old secret ended everywhere", 5)
    assert statuses(new["key"]) == {200}
    site.server.cli("tenants", "disable", "acme")
    poll(lambda: statuses(new["key"]) == {403}, "disabled everywhere", 5)
    assert statuses(spared) == {200}
    site.server.cli("tenants", "enable", "acme")
    poll(lambda: statuses(new["key"]) == {200}, "enabled everywhere", 5)


def test_services_file_is_followed_and_a_wrong_one_changes_nothing(site: Site) -> None:
    """Hot reload in every worker and in the admin API."""
    key = site.server.key

    def statuses() -> set[int]:
        url = f"{site.server.url}/services/late/v1/models"
        return {httpx.get(url, headers={"X-API-Key": key}).status_code for _ in range(12)}

    assert statuses() == {404}
    site.file.write_text(SERVICES + "  - {name: late, model: nonsense}\n")
    poll(lambda: site.server.text.count("services_file_refused") >= 3, "the mistake is told by all", 10)
    assert site.post("/services/poems", key).status_code == 200
    assert statuses() == {404}
    site.file.write_text(SERVICES + "  - {name: late}\n")
    poll(lambda: statuses() == {200}, "the new service in every worker", 10)

    def listed() -> set[str]:
        return {service["name"] for service in site.admin("GET", "/services")["data"]}

    poll(lambda: listed() == {"poems", "sso", "open", "late", "default"}, "the new service in the admin API")
    shown = json.loads(site.server.cli("services", "list", "--json", "--auth.services_file", str(site.file),
                                       "--served-model-name", MODEL, "--jwt.issuer", site.issuer.url,
                                       "--engine.lora_adapters", '{"poet": "x"}'))  # fmt: skip
    assert {service["name"] for service in shown} == listed()


def test_the_log_names_tenant_and_service_and_no_credential(site: Site) -> None:
    """Neither keys, nor tokens, nor the admin credential are in it."""
    token = site.token(sub="user-x")
    site.post("/services/sso", token)
    site.post("", TOKEN)
    lines = [json.loads(line) for line in site.server.text.splitlines() if line.startswith("{")]
    assert any((line.get("service"), line.get("tenant")) == ("sso", "acme") for line in lines)
    text = "\n".join(line for line in site.server.text.splitlines() if line.startswith("{"))
    assert token not in text
    assert token.rpartition(".")[2] not in text
    assert TOKEN not in text
    assert site.server.key not in text
