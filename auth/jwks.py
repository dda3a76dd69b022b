"""The issuer's signing keys (JWKS, RFC 7517): fetched beside the requests, kept while the issuer is down."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from auth.errors import SigningKeysUnavailable
from server.auth_sections import JwtSettings, is_safe_url

log = structlog.get_logger()

MAX_DOCUMENT_BYTES = 256 * 1024
MAX_KEYS = 100
MIN_RSA_BITS = 2048
DISCOVERY = "/.well-known/openid-configuration"
WAIT_S = 2.0
"""Longest that a request with an unknown key id waits for a fetch."""

_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key, and the algorithms it may be used with."""

    key: Any
    algorithms: frozenset[str]


class Jwks:
    """The signing keys of one issuer, by key id.

    They are fetched anew every `jwks_refresh_s` seconds, and for an unknown key id at once, but not again
    within `jwks_cooldown_s`. While fetches fail, the former keys stay.
    """

    def __init__(self, settings: JwtSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._client = httpx.AsyncClient(timeout=settings.jwks_timeout_s, follow_redirects=False)
        self._url = settings.jwks_url
        self._keys: dict[str, SigningKey] = {}
        self._known = False
        self._tried_at = float("-inf")
        self._fetching: asyncio.Task[bool] | None = None

    async def close(self) -> None:
        """Ends a running fetch and closes connections."""
        if self._fetching is not None:
            self._fetching.cancel()
        await self._client.aclose()

    async def key(self, key_id: str) -> SigningKey | None:
        """The key of this id, None if the issuer has none. Raises SigningKeysUnavailable."""
        found = self._keys.get(key_id)
        if found is not None:
            return found
        fetching = self._fetch()
        if fetching is not None:
            await asyncio.wait({fetching}, timeout=WAIT_S)
        if not self._known:
            raise SigningKeysUnavailable("the issuer's signing keys can't be had")
        return self._keys.get(key_id)

    async def keep_fresh(self) -> None:
        """Fetches now and then every `jwks_refresh_s`; sooner again after a failure. Endless."""
        while True:
            fetching = self._fetch()
            fine = fetching is None or await asyncio.shield(fetching)
            await asyncio.sleep(self._settings.jwks_refresh_s if fine else self._settings.jwks_cooldown_s)

    def _fetch(self) -> asyncio.Task[bool] | None:
        """The running fetch, a new one, or None when the last one is too short ago."""
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        if self._clock() - self._tried_at < self._settings.jwks_cooldown_s:
            return None
        self._tried_at = self._clock()
        self._fetching = asyncio.create_task(self._replace())
        return self._fetching

    async def _replace(self) -> bool:
        """Fetches the keys; False, with the old ones kept, when that fails."""
        try:
            async with asyncio.timeout(self._settings.jwks_timeout_s):
                if self._url is None:
                    self._url = await self._discover()
                keys = signing_keys(await self._document(self._url))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError) as error:
            log.error("signing_keys_not_fetched", reason=str(error) or type(error).__name__)
            return False
        if keys.keys() != self._keys.keys():
            log.info("signing_keys", key_ids=sorted(keys)[:10], count=len(keys))
        self._keys, self._known = keys, True
        return True

    async def _discover(self) -> str:
        """The address of the keys in the issuer's own description (OpenID Connect Discovery 1.0)."""
        issuer = str(self._settings.issuer)
        document = await self._document(issuer.rstrip("/") + DISCOVERY)
        url = document.get("jwks_uri")
        if document.get("issuer") != issuer or not isinstance(url, str) or not is_safe_url(url):
            raise ValueError("the issuer's description names another issuer, or no https address of its keys")
        return url

    async def _document(self, url: str) -> dict[str, Any]:
        content = b""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._client.stream("GET", url, headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"status {answer.status_code}")
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"larger than {MAX_DOCUMENT_BYTES} bytes")
        document = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        return document


def signing_keys(document: dict[str, Any]) -> dict[str, SigningKey]:
    """The usable keys of a JWKS document; keys of other kinds and uses are left out. Raises ValueError."""
    entries = document.get("keys")
    if not isinstance(entries, list):
        raise ValueError("no JWKS document: it has no list of keys")
    found: dict[str, SigningKey] = {}
    for entry in entries[:MAX_KEYS]:
        key = _signing_key(entry) if isinstance(entry, dict) else None
        if key is not None and isinstance(entry.get("kid"), str):
            found.setdefault(entry["kid"], key)
    return found


def _signing_key(entry: dict[str, Any]) -> SigningKey | None:
    if entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("use", "sig") != "sig":
        return None
    if "d" in entry:  # a private key that has got out: nobody should trust it
        return None
    try:
        key = jwt.PyJWK({name: value for name, value in entry.items() if name != "alg"}).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    algorithms = _algorithms(key)
    if isinstance(entry.get("alg"), str):
        algorithms &= {entry["alg"]}
    return SigningKey(key, algorithms) if algorithms else None


def _algorithms(key: Any) -> frozenset[str]:
    if isinstance(key, RSAPublicKey):
        return _RSA if key.key_size >= MIN_RSA_BITS else frozenset()
    if isinstance(key, EllipticCurvePublicKey):
        return frozenset({_CURVES[key.curve.name]}) if key.curve.name in _CURVES else frozenset()
    return frozenset({"EdDSA"}) if isinstance(key, Ed25519PublicKey) else frozenset()
