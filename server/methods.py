"""HEAD, OPTIONS, and the methods a path has."""

from fastapi import FastAPI, Request, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError


class HeadAsGet:
    """HEAD is answered as GET without the body; FastAPI's routes would refuse it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def bodiless(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app(dict(scope, method="GET"), receive, bodiless)


def install(app: FastAPI) -> None:
    """Answers OPTIONS, and 405 with all the path's methods (Starlette names those of one route)."""
    app.add_exception_handler(405, _method_not_allowed)


async def _method_not_allowed(request: Request, _error: Exception) -> Response:
    allow = {"Allow": ", ".join(sorted(_methods(request)))}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=allow)
    error = ApiError(405, "Method Not Allowed.", code="method_not_allowed", headers=allow)
    return error.response(request.url.path)


def _methods(request: Request) -> set[str]:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {"OPTIONS"}.union(*(route.methods or () for route in matching))
    return methods | ({"HEAD"} if "GET" in methods else set())
