"""Where the media of a message may come from: bytes in the request, or hosts that the operator named."""

import binascii
import re

from server.validation.limits import ModelLimits
from server.validation.rules import refuse, text

MAX_URL_CHARS = 8192
WEB_URL = re.compile(r"https?://([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?")
"""Only what every URL reader reads alike: no user, no backslash, no blanks, ASCII alone."""
DATA_URL = re.compile(r"data:([a-z]+)/([a-zA-Z0-9.+-]{1,64});base64,")
IMAGE_STARTS = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"GIF87a",
    b"GIF89a",
    b"RIFF",
    b"BM",
    b"II*\x00",
    b"MM\x00*",
)
PROBE_CHARS = 64
"""Characters of base64 that hold the longest start of an image."""

_url = text(MAX_URL_CHARS, min_chars=1)


def check_media_url(name: str, url: object, kind: str, limits: ModelLimits) -> None:
    """A URL of `kind` (`image`, `audio`, `video`). Nothing is looked up or fetched here.

    Names are compared with `requests.media_domains`; an address or a private host passes only if it is listed
    there as it stands.
    """
    if isinstance(url, str) and url.startswith("data:"):
        _check_data_url(name, url, kind)
        return
    _url(name, url)
    match = WEB_URL.fullmatch(str(url))
    if match is None:
        raise refuse(
            "invalid_value",
            name,
            f"Invalid '{name}': expected a data: URL with base64, or a plain https URL.",
        )
    if match.group(1).lower() not in limits.settings.media_domains:
        message = (
            f"Invalid '{name}': this server does not fetch from that host; send the data in a data: URL."
        )
        raise refuse("invalid_value", name, message)


def _check_data_url(name: str, url: str, kind: str) -> None:
    match = DATA_URL.match(url)
    if match is None or match.group(1) != kind:
        raise refuse("invalid_value", name, f"Invalid '{name}': expected data:{kind}/...;base64,...")
    check_base64(name, url, match.end())
    if kind == "image":
        start = binascii.a2b_base64(url[match.end() : match.end() + PROBE_CHARS])
        if not start.startswith(IMAGE_STARTS):
            raise refuse("invalid_image_format", name, f"Invalid '{name}': the data is not an image.")


def check_base64(name: str, value: str, start: int = 0) -> None:
    """Standard base64 from `start` on, padded, of at least one byte."""
    try:
        if binascii.a2b_base64(value[start:], strict_mode=True):
            return
    except (binascii.Error, ValueError):
        pass
    raise refuse("invalid_base64", name, f"Invalid '{name}': not valid base64.")
