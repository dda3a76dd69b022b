"""API keys as text: how one looks, how it is hashed, how it is read from a request's headers."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from auth.errors import BadCredentials

KEY_MARK = "lapilli_"
"""Start of each key, so that secret scanners can know one."""
PREFIX_CHARS = len(KEY_MARK) + 4
"""Characters of a key that may be shown: 4 of the 43 secret ones."""
MAX_CREDENTIAL_BYTES = 8192
"""A key has 51; tokens have more."""

_KEY = re.compile(rf"{KEY_MARK}[A-Za-z0-9_-]{{43}}")
_TOKEN68 = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
_BEARER = re.compile(rb"bearer +(.*)", re.IGNORECASE | re.DOTALL)


def new_key() -> str:
    """A fresh key: the mark and 43 URL-safe characters (256 random bits)."""
    return KEY_MARK + secrets.token_urlsafe(32)


def is_key(text: str) -> bool:
    """Whether `text` has the form of a key."""
    return _KEY.fullmatch(text) is not None


def hash_key(key: str) -> str:
    """SHA-256 of `key` in hex, which is what the store keeps.

    A fast hash is right here: slow ones (bcrypt, argon2) make guessing of weak passwords expensive, but a key
    is 256 random bits, so there is nothing to guess, and this runs on every request.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def parse_credentials(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The API key in `Authorization: Bearer KEY` (RFC 6750) or `X-API-Key: KEY`.

    The scheme may have any case, and several spaces may follow it (RFC 7235). Where both headers are sent
    they must hold the same key; neither wins. Raises BadCredentials, whatever the bytes.
    """
    values: dict[bytes, bytes] = {}
    for raw_name, value in headers:
        name = raw_name.lower()
        if name not in (b"authorization", b"x-api-key"):
            continue
        if name in values:
            raise BadCredentials(f"More than one {_spelling(name)} header.")
        values[name] = value.strip(b" \t")
    if not values:
        raise BadCredentials("No API key: send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'.")
    keys = [_token(name, value) for name, value in values.items()]
    if not hmac.compare_digest(keys[0], keys[-1]):
        raise BadCredentials("The Authorization and X-API-Key headers hold different keys.")
    return keys[0].decode("ascii")


def _token(name: bytes, value: bytes) -> bytes:
    if len(value) > MAX_CREDENTIAL_BYTES:
        raise BadCredentials(f"The {_spelling(name)} header is too long for an API key.")
    if name == b"authorization":
        match = _BEARER.fullmatch(value)
        if match is None:
            raise BadCredentials("The Authorization header must be 'Bearer KEY'.")
        value = match[1]
    if _TOKEN68.fullmatch(value) is None:
        raise BadCredentials(f"The {_spelling(name)} header holds no well-formed API key.")
    return value


def _spelling(name: bytes) -> str:
    return "Authorization" if name == b"authorization" else "X-API-Key"
