"""Bearer tokens of an OpenID Connect issuer (cases O17 and O18): real keys, rotated, fetched over HTTP."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from auth.cache import KeyCache
from auth.database import Database
from auth.errors import BadCredentials, Forbidden, IdentityUnavailable, TenantDisabled
from auth.identity import Identity
from auth.jwks import MAX_DOCUMENT_BYTES, Jwks, signing_keys
from auth.jwt import TokenVerifier
from auth.keys import new_key
from auth.services import Service
from auth.store import KeyStore
from auth.tenants import TenantStore
from server.auth_sections import AuthSettings, JwtSettings
from tests.oidc import jwk, rsa_key, running_issuer

AUDIENCE = "lapilli"
PLAIN = Service(name="default", auth=["apikey", "jwt"])
FIRST, SECOND, OTHER = rsa_key(), rsa_key(), rsa_key()


@pytest.fixture(scope="module")
def issuer_server():
    """One HTTP server for all tests."""
    with running_issuer() as server:
        yield server


@pytest.fixture
def issuer(issuer_server):
    """The issuer with its first key, and nothing asked yet."""
    issuer_server.keys = [jwk(FIRST, "k1")]
    issuer_server.status, issuer_server.body = 200, None
    issuer_server.asked.clear()
    issuer_server.hold.set()
    return issuer_server


def claims(issuer, **more):
    now = int(time.time())
    made = {
        "iss": issuer.url,
        "aud": AUDIENCE,
        "sub": "user-1",
        "tenant": "acme",
        "iat": now,
        "exp": now + 60,
    }
    return {name: value for name, value in (made | more).items() if value is not None}


def token(issuer, key=FIRST, kid="k1", algorithm="RS256", headers=None, **more):
    return jwt.encode(claims(issuer, **more), key, algorithm, headers={"kid": kid} | (headers or {}))


class Clock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@dataclass
class Parts:
    """A verifier over an issuer and a database with the tenants `acme` and `off` (disabled)."""

    verifier: TokenVerifier
    jwks: Jwks
    tenants: TenantStore
    clock: Clock = field(default_factory=Clock)

    async def status(self, text):
        """What HTTP status the token would get."""
        try:
            await self.verifier.principal(text)
        except BadCredentials:
            return 401
        except Forbidden:
            return 403
        except IdentityUnavailable:
            return 503
        return 200


@asynccontextmanager
async def opened(issuer, **more):
    values = {"issuer": issuer.url, "audience": AUDIENCE, "algorithms": "RS256,ES256,EdDSA"} | more
    options = JwtSettings(**values)
    database = Database("sqlite+aiosqlite://")
    await database.open()
    await database.upgrade()
    tenants = TenantStore(database)
    await tenants.create("acme", service_class="interactive", weight=3)
    await tenants.create("off")
    await tenants.disable("off")
    clock = Clock()
    jwks = Jwks(options, clock=clock)
    try:
        yield Parts(TokenVerifier(options, jwks, KeyCache(database)), jwks, tenants, clock)
    finally:
        await jwks.close()
        await database.close()


def test_a_good_token_and_its_principal(issuer):
    async def run():
        async with opened(issuer) as parts:
            found = await parts.verifier.principal(token(issuer, scope="chat:write models:read"))
            assert (found.tenant, found.service_class, found.weight) == ("acme", "interactive", 3.0)
            assert found.key_name == "user-1"
            assert found.key_id.startswith("sub_")
            assert found.scopes == {"chat:write", "models:read"}
            assert found.cache_group == "tenant:acme"
            assert found.cache_salt
            again = await parts.verifier.principal(token(issuer, scope=["a", 5], **{"class": "batch"}))
            assert again.key_id == found.key_id
            assert (again.service_class, again.scopes) == ("batch", {"a"})
            other = await parts.verifier.principal(token(issuer, sub="user-2"))
            assert other.key_id != found.key_id
            assert other.scopes == frozenset()
            odd = await parts.verifier.principal(token(issuer, sub="a\nb"))
            assert odd.key_name == "token"
            assert issuer.asked == ["/.well-known/openid-configuration", "/jwks"]

    asyncio.run(run())


def test_every_kind_of_key(issuer):
    curve, edwards = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    issuer.keys = [jwk(curve, "e"), jwk(edwards, "d"), jwk(FIRST, "r", alg="RS256")]

    async def run():
        async with opened(issuer, algorithms=["RS256", "RS512", "ES256", "EdDSA"]) as parts:
            assert await parts.status(token(issuer, curve, "e", "ES256")) == 200
            assert await parts.status(token(issuer, edwards, "d", "EdDSA")) == 200
            assert await parts.status(token(issuer, FIRST, "r", "RS256")) == 200
            assert await parts.status(token(issuer, FIRST, "r", "RS512")) == 401, (
                "the JWK names its algorithm"
            )

    asyncio.run(run())


def _b64(data):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _unsigned(header, body, secret=None):
    signed = f"{_b64(header)}.{_b64(body)}"
    return f"{signed}." + (
        "" if secret is None else _b64(hmac.digest(secret, signed.encode(), hashlib.sha256))
    )


def forgeries(issuer):
    """Case O17, by name: tokens with good claims that nobody may take."""
    body, public = claims(issuer), FIRST.public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    secrets = {
        "PEM": public.public_bytes(serialization.Encoding.PEM, form),
        "DER": public.public_bytes(serialization.Encoding.DER, form),
        "JWK": json.dumps(jwk(FIRST, "k1")).encode(),
        "empty": b"",
    }
    evil = issuer.url + "/evil"
    own = jwk(OTHER, "k1")
    good = token(issuer)
    return {
        **{
            f"alg {name}": _unsigned({"alg": name, "kid": "k1"}, body)
            for name in ("none", "None", "nOnE", "")
        },
        **{f"alg {name!r}": _unsigned({"alg": name, "kid": "k1"}, body) for name in (None, 5, ["RS256"], {})},
        **{f"HS256 {name}": _unsigned({"alg": "HS256", "kid": "k1"}, body, s) for name, s in secrets.items()},
        "no alg": _unsigned({"kid": "k1"}, body),
        "jwk in the header": token(issuer, OTHER, headers={"jwk": own}),
        "jku": token(issuer, OTHER, headers={"jku": evil}),
        "x5u": token(issuer, OTHER, headers={"x5u": evil}),
        "right kid, another key": token(issuer, OTHER),
        "no kid": jwt.encode(body, FIRST, "RS256"),
        "kid of another type": _unsigned({"alg": "RS256", "kid": ["k1"]}, body),
        "algorithm not allowed": token(issuer, algorithm="PS256"),
        "crit": _unsigned({"alg": "RS256", "kid": "k1", "crit": ["x"], "x": 1}, body),
        "no signature": good.rpartition(".")[0] + ".",
        "signature of another token": good.rpartition(".")[0]
        + "."
        + token(issuer, sub="x").rpartition(".")[2],
        "changed claims": ".".join(
            [good.split(".")[0], _b64(body | {"tenant": "default"}), good.split(".")[2]]
        ),
        "deep header": f"{_b64(b'[' * 5000)}.{_b64(body)}.x",
        "deep claims": f"{good.split('.')[0]}.{_b64(b'[' * 3000)}.{good.split('.')[2]}",
        "not JSON": f"{_b64(b'x')}.{_b64(b'y')}.z",
        "not base64": "a.b.c",
        "dots": "..",
    }


WRONG_CLAIMS = {
    "expired": {"exp": 1},
    "no exp": {"exp": None},
    "exp text": {"exp": "soon"},
    "exp not a number": {"exp": float("nan")},
    "exp infinite": {"exp": float("inf")},
    "not yet": {"nbf": 2**40},
    "nbf text": {"nbf": "x"},
    "another issuer": {"iss": "https://evil.example"},
    "no issuer": {"iss": None},
    "another audience": {"aud": "others"},
    "no audience": {"aud": None},
    "audience of another type": {"aud": {"lapilli": 1}},
    "no subject": {"sub": None},
    "subject of another type": {"sub": 5},
    "issued in the future": {"iat": 2**40},
}


def test_forged_and_wrong_tokens_are_401(issuer):
    """Case O17: none is taken, nothing but the issuer's own two paths is asked."""

    async def run():
        async with opened(issuer) as parts:
            assert await parts.status(token(issuer)) == 200
            parts.clock.now_s = 100  # past the cool-down: nothing here may cause a fetch
            found = {name: await parts.status(text) for name, text in forgeries(issuer).items()}
            found |= {name: await parts.status(token(issuer, **more)) for name, more in WRONG_CLAIMS.items()}
            assert {name: status for name, status in found.items() if status != 401} == {}
            assert await parts.status(token(issuer)) == 200
            assert issuer.asked == ["/.well-known/openid-configuration", "/jwks"]

    asyncio.run(run())


def test_leeway_holds_at_both_ends(issuer):
    now = int(time.time())

    async def run():
        async with opened(issuer, leeway_s=30) as parts:
            assert await parts.status(token(issuer, exp=now - 15)) == 200
            assert await parts.status(token(issuer, exp=now - 60)) == 401
            assert await parts.status(token(issuer, nbf=now + 15)) == 200
            assert await parts.status(token(issuer, nbf=now + 90)) == 401
            assert await parts.status(token(issuer, aud=["others", AUDIENCE])) == 200

    asyncio.run(run())


def test_tenants_and_classes_that_are_not_known_are_403(issuer):
    async def run():
        async with opened(issuer) as parts:
            for tenant in (None, "nobody", "", 5, ["acme"], {"a": 1}, "off", "a" * 5000):
                assert await parts.status(token(issuer, tenant=tenant)) == 403, tenant
            for name in ("gold", 5, ["batch"], ""):
                assert await parts.status(token(issuer, **{"class": name})) == 403, name
            with pytest.raises(TenantDisabled):
                await parts.verifier.principal(token(issuer, tenant="off"))
        async with opened(issuer, default_tenant="acme", tenant_claim="org") as parts:
            assert await parts.status(token(issuer)) == 200
            assert await parts.status(token(issuer, org="nobody")) == 403

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60) | st.dictionaries(st.sampled_from(["alg", "kid", "typ", "b64"]), st.text()),
    st.binary(max_size=60) | st.dictionaries(st.text(max_size=5), st.integers() | st.text()),
    st.binary(),
)
def test_any_bytes_are_refused_and_nothing_else_is_raised(header, body, signature):
    verifier = TokenVerifier(JwtSettings(issuer="https://i.example", audience="a"), None, None)
    with pytest.raises(BadCredentials):
        asyncio.run(verifier.principal(f"{_b64(header)}.{_b64(body)}.{_b64(signature)}"))


# --- case O18: rotation ---


def test_rotation_and_a_flood_of_unknown_key_ids(issuer):
    async def run():
        async with opened(issuer) as parts:
            assert await parts.status(token(issuer)) == 200
            issuer.keys.append(jwk(SECOND, "k2"))
            parts.clock.now_s = 10
            assert await parts.status(token(issuer, SECOND, "k2")) == 200, "at the first try"
            assert await parts.status(token(issuer)) == 200
            assert issuer.fetches == 2
            parts.clock.now_s = 20
            made_up = [token(issuer, OTHER, uuid.uuid4().hex) for _ in range(50)]
            for number in range(10):  # 500 in 5 s
                parts.clock.now_s += 0.5
                mixed = [*made_up, token(issuer)] if number else made_up
                found = await asyncio.gather(*[parts.status(text) for text in mixed])
                assert found[:50] == [401] * 50
                assert found[50:] == [200] * (number > 0)
            assert issuer.fetches <= 5
            # Withdrawn: the first key ends with the next fetch.
            issuer.keys = issuer.keys[1:]
            keeping = asyncio.create_task(parts.jwks.keep_fresh())
            parts.clock.now_s += 300
            for _ in range(100):
                await asyncio.sleep(0.02)
                if await parts.status(token(issuer)) == 401:
                    break
            assert await parts.status(token(issuer)) == 401
            assert await parts.status(token(issuer, SECOND, "k2")) == 200
            keeping.cancel()

    asyncio.run(run())


def test_keys_are_kept_while_the_issuer_is_down_or_talks_nonsense(issuer):
    async def run():
        async with opened(issuer) as parts:
            assert await parts.status(token(issuer)) == 200
            bodies = [
                b"",
                b"{",
                b"[]",
                b"{}",
                b'{"keys": 5}',
                b"[" * 100_000,
                b" " * (MAX_DOCUMENT_BYTES + 1),
            ]
            for status, body in [(500, b"{}"), (302, b"{}"), (404, b""), *((200, body) for body in bodies)]:
                issuer.status, issuer.body = status, body
                parts.clock.now_s += 100
                before = issuer.fetches
                assert await parts.status(token(issuer, SECOND, "k2")) == 401
                assert issuer.fetches == before + 1
                assert await parts.status(token(issuer)) == 200
            assert "/elsewhere" not in issuer.asked, "redirects are not followed"
            issuer.status, issuer.body, issuer.keys = 200, None, [jwk(SECOND, "k2")]
            parts.clock.now_s += 100
            assert await parts.status(token(issuer, SECOND, "k2")) == 200
            assert await parts.status(token(issuer)) == 401

    asyncio.run(run())


def test_an_issuer_that_hangs_stops_no_good_token(issuer):
    async def run():
        async with opened(issuer, jwks_timeout_s=0.2) as parts:
            assert await parts.status(token(issuer)) == 200
            issuer.hold.clear()
            parts.clock.now_s = 100
            waiting = asyncio.create_task(parts.status(token(issuer, SECOND, "k2")))
            await asyncio.sleep(0.01)
            assert await parts.status(token(issuer)) == 200
            assert not waiting.done()
            assert await waiting == 401
            issuer.hold.set()

    asyncio.run(run())


def test_an_issuer_that_was_never_reached_is_503_until_it_is(issuer):
    async def run():
        async with opened(issuer) as parts:
            issuer.status = 500
            assert await parts.status(token(issuer)) == 503
            issuer.status = 200
            assert await parts.status(token(issuer)) == 503, "within the cool-down"
            parts.clock.now_s = 5
            assert await parts.status(token(issuer)) == 200

    asyncio.run(run())


def test_the_description_must_be_the_issuers_own(issuer):
    async def run():
        for document in ({"issuer": "https://evil.example", "jwks_uri": issuer.url + "/jwks"},
                         {"issuer": issuer.url, "jwks_uri": "http://evil.example/jwks"},
                         {"issuer": issuer.url}):  # fmt: skip
            async with opened(issuer) as parts:
                issuer.answer = lambda path, document=document: json.dumps(document).encode()
                assert await parts.status(token(issuer)) == 503
                del issuer.answer
        assert issuer.fetches == 0

    asyncio.run(run())


def test_unusable_keys_are_left_out():
    small = rsa_key(1024)
    odd_curve = ec.generate_private_key(ec.SECP256K1())
    entries = [
        jwk(FIRST, "good"),
        jwk(SECOND, "good"),
        jwk(small, "small"),
        jwk(odd_curve, "curve"),
        jwk(FIRST, "encryption", use="enc"),
        {**jwk(FIRST, "private"), "d": "AQAB"},
        {"kty": "oct", "k": _b64(b"x" * 32), "kid": "symmetric"},
        {"kty": "RSA", "kid": "empty"},
        {"kty": "RSA", "n": 5, "e": [], "kid": "types"},
        {**jwk(FIRST, "x"), "kid": 5},
        jwk(FIRST, "HS", alg="HS256"),
        "text",
        None,
    ]
    found = signing_keys({"keys": entries})
    assert set(found) == {"good"}
    assert found["good"].key.public_numbers() == FIRST.public_key().public_numbers()


# --- settings ---


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"issuer": "http://i.example", "audience": "a"}, "not an https address"),
        ({"issuer": "file:///etc", "audience": "a"}, "not an https address"),
        ({"jwks_url": "http://169.254.169.254/keys"}, "not an https address"),
        ({"algorithms": "none"}, "Input should be"),
        ({"algorithms": "RS256,HS256"}, "Input should be"),
        ({"algorithms": []}, "at least 1"),
        ({"leeway_s": 301}, "less than or equal to 300"),
    ],
)
def test_settings_that_cannot_be(values, reason):
    with pytest.raises(ValidationError, match=reason):
        JwtSettings(**values)


# --- with API keys beside ---


def test_keys_and_tokens_side_by_side(issuer, sqlite_url):
    """An API key stays good; without an issuer a token is a bad key."""

    async def run():
        database = Database(sqlite_url)
        await database.open()
        await database.upgrade()
        await TenantStore(database).create("acme")
        _, secret = await KeyStore(database).create("a")
        await database.close()
        auth = AuthSettings(database_url=sqlite_url)
        for options, status in (
            (JwtSettings(issuer=issuer.url, audience=AUDIENCE), 200),
            (JwtSettings(), 401),
        ):
            identity = Identity(auth, options)
            await identity.start()
            bearer = [(b"authorization", b"Bearer " + token(issuer).encode())]
            assert (await identity.identify([(b"x-api-key", secret.encode())], PLAIN)).key_name == "a"
            if status == 200:
                assert (await identity.identify(bearer, PLAIN)).key_name == "user-1"
            else:
                with pytest.raises(BadCredentials):
                    await identity.identify(bearer, PLAIN)
            with pytest.raises(BadCredentials):
                await identity.identify([*bearer, (b"x-api-key", new_key().encode())], PLAIN)
            await identity.close()

    asyncio.run(run())
