"""CORS for browsers: off unless `gateway.cors_origins` names origins."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.sections import GatewaySettings

METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = (
    "Retry-After",
    "X-Request-Id",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
"""Response headers that scripts may read beside the few that browsers always allow."""


class Cors(CORSMiddleware):
    """Starlette's CORS layer; a foreign origin gets no CORS header at all, and refusals are JSON.

    It is the outermost layer, so every answer passes it, errors too; a pre-flight ends here, with no key
    and nothing counted.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=METHODS,
            # Clients in browsers send headers of their own (x-stainless-os, anthropic-version): all are fine.
            allow_headers=("*",),
            allow_credentials=settings.cors_allow_credentials,
            expose_headers=EXPOSED,
            max_age=settings.cors_max_age_s,
        )

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        """An ordinary request."""
        origin = request_headers.get("origin")
        if origin is not None and not self.is_allowed_origin(origin):
            await self.app(scope, receive, send)
            return
        await super().simple_response(scope, receive, send, request_headers)

    def preflight_response(self, request_headers: Headers) -> Response:
        """The browser's question before it sends a request."""
        if not self.is_allowed_origin(request_headers["origin"]):
            return _refused("Requests from this origin are not allowed.", {})
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        kept = {name: response.headers[name] for name in ("access-control-allow-origin", "vary")}
        return _refused(f"{bytes(response.body).decode()}.", kept)


def _refused(message: str, headers: dict[str, str]) -> Response:
    return ApiError(400, message, code="cors_refused", headers=headers).response("")
