"""Services: the file, its mistakes, its changes, and who may call what."""

import asyncio
import pickle
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import jwt
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from auth.database import Database
from auth.errors import BadCredentials, Forbidden
from auth.identity import Identity
from auth.principal import Limits
from auth.services import Offer, Service, Services, load_services, table_of
from auth.store import KeyStore
from auth.tenants import TenantStore
from server.auth_sections import AuthSettings, JwtSettings
from server.config_sources import SettingsError
from server.context import RequestContext
from server.errors import ApiError
from server.protocol.parts import Parts
from tests.conftest import ROOT
from tests.oidc import jwk, rsa_key, running_issuer

OFFER = Offer(("base", "adapter"), tokens=True)
SIGNING_KEY = rsa_key()

GOOD = """
services:
  - name: chat
    model: adapter
    auth: [apikey, jwt]
    scopes: [chat:write]
    limits: {requests_per_min: 60, max_output_tokens: 100}
  - {name: open, auth: none, tenant: guests, endpoint: /pub/v2}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "services.yaml"
    path.write_text(GOOD)
    return path


def test_what_the_file_declares(file):
    table = load_services(file, OFFER)
    chat, open_, plain = (next(s for s in table.services if s.name == n) for n in ("chat", "open", "default"))
    assert (chat.endpoint, chat.model, chat.auth, chat.tenant) == (
        "/services/chat",
        "adapter",
        ("apikey", "jwt"),
        "default",
    )
    assert chat.scopes == {"chat:write"}
    assert chat.limits == Limits(requests_per_s=None, requests_per_min=60, max_output_tokens=100)
    assert chat.shown()["limits"] == {"requests_per_min": 60, "max_output_tokens": 100}
    assert (open_.endpoint, open_.auth, open_.tenant) == ("/pub/v2", ("none",), "guests")
    assert (plain.endpoint, plain.auth, plain.model) == ("/", ("apikey", "jwt"), None)
    assert table.plain is plain


def test_without_a_file_there_are_the_plain_paths():
    assert [s.name for s in load_services(None, OFFER).services] == ["default"]
    assert load_services(None, Offer(("base",), tokens=False)).plain.auth == ("apikey",)


def test_the_file_that_is_shipped_is_good():
    table = load_services(ROOT / "configs/services.yaml", Offer(("base",), tokens=False))
    assert {s.endpoint for s in table.services} == {"/", "/services/chat"}


PATHS = {
    "/v1/chat/completions": ("default", "/v1/chat/completions"),
    "/services/chat/v1/chat/completions": ("chat", "/v1/chat/completions"),
    "/services/chat/tokenize": ("chat", "/tokenize"),
    "/services/chat": ("default", "/services/chat"),
    "/services/chat/": ("chat", "/"),
    "/services/chatty/v1/models": ("default", "/services/chatty/v1/models"),
    "/services/chat/deep/v1/models": ("deep", "/v1/models"),
    "/SERVICES/chat/v1/models": ("default", "/SERVICES/chat/v1/models"),
    "": ("default", ""),
}


@pytest.mark.parametrize(("path", "found"), PATHS.items(), ids=PATHS)
def test_paths(path, found):
    table = table_of([Service(name="chat"), Service(name="deep", endpoint="/services/chat/deep")], OFFER)
    service, rest = table.match(path)
    assert (service.name, rest) == found


@given(st.text(alphabet="/abv1.", max_size=20))
def test_a_path_is_its_endpoint_and_the_rest(path):
    table = table_of([Service(name="a", endpoint="/a"), Service(name="b", endpoint="/a/b")], OFFER)
    service, rest = table.match(path)
    prefix = "" if service.name == "default" else service.endpoint
    assert prefix + rest == path


BAD = {
    "not YAML": ("services: [", "services.yaml: not YAML ("),
    "no list": ("services: {}", "must hold one key, services, with a list"),
    "another key": ("services: []\nmore: 1", "must hold one key, services, with a list"),
    "nothing": ("", "must hold one key, services, with a list"),
    "key twice": ("services: []\nservices: []", "key services appears twice"),
    "no name": ("services: [{}]", "services[0].name: Field required"),
    "text": ("services: [a]", "services[0]: Input should be a valid dictionary"),
    "name": ("services: [{name: A b}]", "services[A b].name: a name has 1 to 64 of a-z"),
    "key": ("services: [{name: a, modle: x}]", "services[a].modle: Extra inputs are not permitted"),
    "auth": ("services: [{name: a, auth: basic}]", "services[a].auth: one of apikey, jwt, none"),
    "auth empty": ("services: [{name: a, auth: []}]", "services[a].auth: one of apikey"),
    "auth mixed": ("services: [{name: a, auth: [none, jwt]}]", "none goes with no other kind"),
    "runtime": ("services: [{name: a, runtime: triton}]", "services[a].runtime: Input should be 'vllm'"),
    "endpoint": ("services: [{name: a, endpoint: a}]", "services[a].endpoint: a path like /services/chat"),
    "endpoint taken": ("services: [{name: a, endpoint: /v1/x}]", "apart from the server's own paths"),
    "endpoint up": ("services: [{name: a, endpoint: /a/..}]", "a path like /services/chat"),
    "endpoint slash": ("services: [{name: a, endpoint: /a/}]", "a path like /services/chat"),
    "plain paths": ("services: [{name: a, endpoint: /}]", "the plain paths belong to the service 'default'"),
    "default elsewhere": (
        "services: [{name: default, endpoint: /x}]",
        "the plain paths belong to the service",
    ),
    "scope": ("services: [{name: a, scopes: ['a b']}]", "services[a].scopes: a scope has 1 to 128"),
    "limit": (
        "services: [{name: a, limits: {tokens: 1}}]",
        "services[a].limits: no limit is called 'tokens'",
    ),
    "limit bounds": (
        "services: [{name: a, limits: {requests_per_s: 1}}]",
        "must be an integer from 10 to 5000",
    ),
    "limits": ("services: [{name: a, limits: 5}]", "services[a].limits: names of limits with numbers"),
    "model": ("services: [{name: a, model: gpt}]", "a: model is none of those served here (base, adapter)"),
    "same name": ("services: [{name: a}, {name: a, endpoint: /b}]", "two services have the name a"),
    "same endpoint": (
        "services: [{name: a}, {name: b, endpoint: /services/a}]",
        "two services have the endpoint",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_mistakes_are_one_line(file, text, message):
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_services(file, OFFER)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_tokens_need_an_issuer(file):
    with pytest.raises(SettingsError, match=r"chat: auth: jwt needs the setting jwt\.issuer"):
        load_services(file, replace(OFFER, tokens=False))
    with pytest.raises(SettingsError, match="cannot be read"):
        load_services(file.parent / "none.yaml", OFFER)


def test_a_changed_file_takes_effect_and_a_wrong_one_leaves_the_former(file):
    services = Services(file, OFFER)
    before = services.table
    services.look()
    assert services.table is before
    with structlog.testing.capture_logs() as logs:
        for text in (BAD["auth"][0], BAD["not YAML"][0], None):
            if text is None:
                file.unlink()
            else:
                file.write_text(text)
            services.look()
            services.look()
            assert services.table is before
    assert [entry["event"] for entry in logs] == ["services_file_refused"] * 3, "told once each"
    # As Kubernetes does it: another file takes the name.
    other = file.with_name("other.yaml")
    other.write_text("services: [{name: new}]")
    other.rename(file)
    services.look()
    assert {s.name for s in services.table.services} == {"new", "default"}


def test_a_process_that_starts_while_the_file_is_wrong_goes_on_with_the_table_it_was_given(file):
    table = load_services(file, OFFER)
    file.write_text("services: [")
    services = Services(file, OFFER, table)
    services.look()
    assert services.table == table
    file.write_text("services: []")
    services.look()
    assert [s.name for s in services.table.services] == ["default"]


def test_follow_sees_a_change(file, monkeypatch):
    monkeypatch.setattr("auth.services.POLL_S", 0.02)

    async def run():
        services = Services(file, OFFER)
        following = asyncio.create_task(services.follow())
        await asyncio.sleep(0)
        file.write_text("services: []")
        for _ in range(200):
            await asyncio.sleep(0.02)
            if len(services.table.services) == 1:
                break
        following.cancel()
        return len(services.table.services)

    assert asyncio.run(run()) == 1


# --- who may call what ---


@asynccontextmanager
async def identities(url: str, issuer_url: str | None = None):
    database = Database(url)
    await database.open()
    await database.upgrade()
    options = JwtSettings(issuer=issuer_url, audience="a") if issuer_url else JwtSettings()
    identity = Identity(AuthSettings(database_url=url), options)
    await identity.start()
    try:
        yield identity, KeyStore(database), TenantStore(database)
    finally:
        await identity.close()
        await database.close()


def key_header(secret):
    return [(b"x-api-key", secret.encode())]


def test_services_and_scopes_of_keys(sqlite_url):
    async def run():
        async with identities(sqlite_url) as (identity, keys, _):
            secrets = {
                "all": (await keys.create("a"))[1],
                "chat": (await keys.create("a", services=["chat"], scopes=["x"]))[1],
                "plain": (await keys.create("a", services=["default"], scopes=["x", "y"]))[1],
                "none": (await keys.create("a", services=[]))[1],
            }
            chat, plain = Service(name="chat", scopes=["x"]), Service(name="default")
            both = Service(name="default", scopes=["x", "y"])

            async def code(secret, service):
                try:
                    await identity.identify(key_header(secret), service)
                except Forbidden as error:
                    return error.code
                return "ok"

            found = {name: [await code(s, svc) for svc in (chat, plain, both)] for name, s in secrets.items()}
            not_allowed = "service_not_allowed"
            assert found == {
                "all": ["ok", "ok", "ok"],
                "chat": ["ok", not_allowed, not_allowed],
                "plain": [not_allowed, "ok", "ok"],
                "none": [not_allowed] * 3,
            }
            held = Service(name="chat", limits={"requests_per_min": 9, "max_output_tokens": 50})
            limited = await identity.identify(key_header(secrets["chat"]), held)
            assert limited.key_limits == Limits(requests_per_min=9, max_output_tokens=50)
            assert limited.tenant_limits == Limits()
            wide = Service(name="chat", scopes=["x", "z"])
            with pytest.raises(Forbidden) as caught:
                await identity.identify(key_header(secrets["chat"]), wide)
            assert caught.value.challenge == 'Bearer error="insufficient_scope", scope="x z"'

    asyncio.run(run())


def test_kinds_of_credentials(sqlite_url):
    async def run(issuer):
        issuer.keys = [jwk(SIGNING_KEY, "k")]
        now = int(time.time())
        claims = {"iss": issuer.url, "aud": "a", "sub": "s", "tenant": "acme", "exp": now + 60, "scope": "x"}
        text = jwt.encode(claims, SIGNING_KEY, "RS256", headers={"kid": "k"})
        bearer = [(b"authorization", b"Bearer " + text.encode())]
        async with identities(sqlite_url, issuer.url) as (identity, keys, tenants):
            await tenants.create("acme")
            await tenants.create("guests", limits={"requests_per_min": 7})
            _, secret = await keys.create("a")
            by_key, by_token = Service(name="a"), Service(name="b", auth="jwt", scopes=["x"])
            assert (await identity.identify(key_header(secret), by_key)).key_name == "a"
            assert (await identity.identify(bearer, by_token)).tenant == "acme"
            for headers, service in (
                (bearer, by_key),
                (key_header(secret), by_token),
                ([], by_key),
                ([], by_token),
            ):
                with pytest.raises(BadCredentials):
                    await identity.identify(headers, service)
            with pytest.raises(Forbidden) as caught:
                await identity.identify(bearer, Service(name="b", auth="jwt", scopes=["y"]))
            assert caught.value.code == "insufficient_scope"
            open_ = Service(name="open", auth="none", tenant="guests", limits={"parallel_requests": 2})
            for headers in ([], bearer, key_header("nonsense")):
                guest = await identity.identify(headers, open_)
                assert guest.key_limits.parallel_requests == 2
                assert (guest.tenant, guest.key_id, guest.tenant_limits.requests_per_min) == (
                    "guests",
                    "anonymous:open",
                    7,
                )
            with pytest.raises(Forbidden):
                await identity.identify([], Service(name="open", auth="none", tenant="nobody"))

    with running_issuer() as issuer:
        asyncio.run(run(issuer))


def test_the_table_travels_to_another_process(file):
    """Workers are started with the table in force."""
    table = load_services(file, OFFER)
    assert pickle.loads(pickle.dumps(table)) == table


class Served:
    """What vLLM's models answer of names."""

    lora_requests = {"adapter": None}

    def is_base_model(self, name):
        return name == "base"


@pytest.mark.parametrize(
    ("model", "asked", "found"),
    [
        (None, None, None),
        (None, "base", "base"),
        (None, "adapter", "adapter"),
        (None, "svc", 404),
        ("adapter", None, "adapter"),
        ("adapter", "adapter", "adapter"),
        ("adapter", "svc", "adapter"),
        ("adapter", "base", 404),
        ("adapter", "x", 404),
    ],
)
def test_which_model_a_request_gets(model, asked, found):
    parts = Parts(None, Served(), None, None, None, None)
    ctx = RequestContext("POST", "/v1/chat/completions", service=Service(name="svc", model=model))
    fields = {"n": 1} | ({} if asked is None else {"model": asked})
    if found == 404:
        with pytest.raises(ApiError) as caught:
            parts.served(fields, ctx)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    else:
        served = parts.served(fields, ctx)
        assert (served.get("model"), served["n"]) == (found, 1)
