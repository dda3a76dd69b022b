"""Errors as OpenAI words them. Only this module makes error bodies."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
import structlog
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

log = structlog.get_logger()

RESPONSES_PATH = "/v1/responses"
ANTHROPIC_PATH = "/v1/messages"
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status, as Anthropic's API documents them; it has 529 where we say 503."""


class ApiError(Exception):
    """An answer that is an error: HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's type for the status."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return TYPES.get(self.status, default)

    def body(self, path: str) -> dict[str, Any]:
        """The JSON body: `{"error": {message, type, param, code}}`, or Anthropic's under /v1/messages."""
        if is_anthropic(path):
            default = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = ANTHROPIC_TYPES.get(self.status, default)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, path: str) -> JSONResponse:
        """The error as an HTTP answer, in the words of the API at `path`."""
        return JSONResponse(self.body(path), self.status, headers=self.headers)

    def event(self, path: str, number: int = 0) -> bytes:
        """The SSE event that ends a stream that broke after its first byte.

        `number` is the event's place in a stream of /v1/responses, whose events are numbered.
        """
        if path.startswith(RESPONSES_PATH):
            code = self.code or self.type
            body = {"type": "error", "code": code, "message": self.message, "param": self.param}
            return b"event: error\ndata: " + orjson.dumps(body | {"sequence_number": number}) + b"\n\n"
        name = b"event: error\n" if is_anthropic(path) else b""
        return name + b"data: " + orjson.dumps(self.body(path)) + b"\n\n"


def is_anthropic(path: str) -> bool:
    """Whether the API at `path` is Anthropic's, whose errors have another shape."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def unauthorized(message: str, challenge: str = "Bearer") -> ApiError:
    """401 with the challenge that RFC 7235 asks for."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def forbidden(message: str, code: str, challenge: str | None = None) -> ApiError:
    """403; `challenge` where another token would do (RFC 6750)."""
    return ApiError(403, message, code=code, headers={"WWW-Authenticate": challenge} if challenge else None)


def unavailable(message: str, retry_after_s: int = 1, *, close: bool = False) -> ApiError:
    """503: it may work again after `retry_after_s` seconds; `close`: on another connection."""
    headers = {"Retry-After": str(retry_after_s)} | ({"Connection": "close"} if close else {})
    return ApiError(503, message, code="service_unavailable", headers=headers)


def body_too_large(limit_bytes: int, *, close: bool = False) -> ApiError:
    """413; `close`: the rest of the body is not waited for."""
    headers = {"Connection": "close"} if close else {}
    message = f"The request body is larger than {limit_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers=headers)


def internal_error() -> ApiError:
    """500 that says nothing of the inside; the log has the rest."""
    return ApiError(500, "The server had an error while processing your request.", code="internal_error")


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own: no such route, method not allowed."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    api_error = ApiError(error.status_code, f"{phrase}.", code=code, headers=error.headers)
    return api_error.response(request.url.path)


def install(app: FastAPI) -> None:
    """Registers the handlers. Unknown exceptions are caught outermost, in middleware.py."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
