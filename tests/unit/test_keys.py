"""API keys: their form, and the header parser (case O16)."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from auth.errors import BadCredentials
from auth.keys import hash_key, is_key, new_key, parse_credentials

KEY = new_key()
OTHER = new_key()
GOOD = KEY.encode()


def test_key_form():
    assert re.fullmatch(r"lapilli_[A-Za-z0-9_-]{43}", KEY)
    assert is_key(KEY)
    assert not any(
        is_key(text) for text in ("", KEY[:-1], KEY + "a", KEY + "\n", "sk-" + "a" * 43, KEY[:-1] + "é")
    )
    assert KEY != OTHER


def test_hash_is_sha256_hex():
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


GOOD_HEADERS = {
    "Bearer": [(b"authorization", b"Bearer " + GOOD)],
    "bearer": [(b"authorization", b"bearer " + GOOD)],
    "BEARER": [(b"Authorization", b"BEARER " + GOOD)],
    "two spaces": [(b"authorization", b"Bearer  " + GOOD)],
    "trailing space": [(b"authorization", b"Bearer " + GOOD + b" ")],
    "X-API-Key": [(b"x-api-key", GOOD)],
    "both, the same": [(b"x-api-key", GOOD), (b"authorization", b"Bearer " + GOOD)],
    "among others": [(b"host", b"h"), (b"accept", b"*/*"), (b"authorization", b"Bearer " + GOOD)],
}


@pytest.mark.parametrize("headers", GOOD_HEADERS.values(), ids=GOOD_HEADERS)
def test_good_headers(headers):
    assert parse_credentials(headers) == KEY


BAD_HEADERS = {
    "none": [],
    "byte E9": [(b"authorization", b"Bearer \xe9")],
    "key and byte E9": [(b"authorization", b"Bearer " + GOOD + b"\xe9")],
    "smart quotes": [(b"authorization", "Bearer “key”".encode())],
    "scheme alone": [(b"authorization", b"Bearer")],
    "empty token": [(b"authorization", b"Bearer ")],
    "empty": [(b"authorization", b"")],
    "no scheme": [(b"authorization", GOOD)],
    "other scheme": [(b"authorization", b"Basic dTpw")],
    "joined": [(b"authorization", b"Bearer" + GOOD)],
    "tab": [(b"authorization", b"Bearer\t" + GOOD)],
    "two tokens": [(b"authorization", b"Bearer " + GOOD + b" " + GOOD)],
    "line feed": [(b"authorization", b"Bearer " + GOOD + b"\n")],
    "NUL": [(b"authorization", b"Bearer \x00" + GOOD)],
    "64 kB": [(b"authorization", b"Bearer " + b"a" * 65536)],
    "two Authorization": [(b"authorization", b"Bearer " + GOOD)] * 2,
    "two X-API-Key": [(b"x-api-key", GOOD)] * 2,
    "empty X-API-Key": [(b"x-api-key", b"")],
    "scheme in X-API-Key": [(b"x-api-key", b"Bearer " + GOOD)],
    "good X-API-Key, other Authorization": [
        (b"x-api-key", GOOD),
        (b"authorization", b"Bearer " + OTHER.encode()),
    ],
    "good Authorization, other X-API-Key": [
        (b"authorization", b"Bearer " + GOOD),
        (b"x-api-key", OTHER.encode()),
    ],
    "good X-API-Key, broken Authorization": [(b"x-api-key", GOOD), (b"authorization", b"Bearer")],
    "good Authorization, empty X-API-Key": [(b"authorization", b"Bearer " + GOOD), (b"x-api-key", b"")],
}


@pytest.mark.parametrize("headers", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers_are_refused_without_quoting_them(headers):
    with pytest.raises(BadCredentials) as caught:
        parse_credentials(headers)
    assert KEY not in str(caught.value)
    assert str(caught.value).isascii()


_names = st.sampled_from([b"authorization", b"Authorization", b"x-api-key", b"X-API-Key", b"host"])
_values = st.binary(max_size=80) | st.builds(
    b"".join, st.lists(st.sampled_from([b"Bearer", b" ", b"=", GOOD]))
)


@given(st.lists(st.tuples(_names, _values), max_size=4))
@example([(b"authorization", b"Bearer " + GOOD)])
def test_parser_gives_an_ascii_token_or_its_own_error(headers):
    try:
        token = parse_credentials(headers)
    except BadCredentials:
        return
    assert token
    assert token.isascii()
    assert any(token.encode() in value for _, value in headers)
