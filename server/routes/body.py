"""A request's body, read only when it is what the route can take."""

from fastapi import Request

from server.errors import ApiError


async def json_body(request: Request) -> bytes:
    """The body of a request that says it holds JSON. Raises ApiError 415.

    `application/json` and types that end in `+json` are taken, in any case and with parameters. A request
    without a content type is refused, as vLLM does: browsers send such requests across origins unasked.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not _is_json_suffix(media_type):
        raise ApiError(
            415,
            "The Content-Type header must be 'application/json'.",
            code="unsupported_media_type",
            headers={"Accept": "application/json"},
        )
    refuse_encoded(request)
    return await request.body()


def refuse_encoded(request: Request) -> None:
    """Raises ApiError 415 for a compressed body: its real size is known only once it is in memory."""
    encodings = request.headers.getlist("content-encoding")
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise ApiError(
            415,
            "The body must not be compressed: send it without a Content-Encoding header.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )


def _is_json_suffix(media_type: str) -> bool:
    return media_type.startswith("application/") and media_type.endswith("+json")
