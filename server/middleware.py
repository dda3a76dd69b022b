"""The ASGI layers around the router, RequestScope outside BodyLimit."""

import re
import time
from collections.abc import Callable, Mapping

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from auth.audit import AuditLog
from auth.limiter import Limiter
from auth.services import Services
from metrics.requests import RequestMetrics
from server.context import RequestContext
from server.errors import body_too_large, internal_error
from server.limits import body_limit

log = structlog.get_logger()

MAX_REQUEST_ID_CHARS = 128
MAX_ADDRESS_CHARS = 45
ADDRESS = re.compile(r"[0-9a-fA-F.:]+")
QUIET_PATHS = frozenset({"/health", "/livez", "/readyz", "/metrics"})


class RequestScope:
    """Makes the request's context, and is the one place where every request ends.

    However it ends (answer, exception, cancel, a client that left), the context is observed and logged
    once, and what it held of its tenant's limits is settled; a request with work in the background ends with
    that. An exception that nobody mapped becomes a 500, or cuts the connection after the first byte.
    """

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, services: Services, limiter: Limiter, audit: AuditLog
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.services = services
        self.limiter = limiter
        self.audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service, path = self.services.table.match(scope["path"])
        scope["path"] = path  # the routes are the same below each service's endpoint
        ctx = RequestContext(method=scope["method"], path=path, service=service, send=send)
        ctx.client_request_id = _client_request_id(scope)
        ctx.client = _client(scope)
        state = scope.setdefault("state", {})
        state["context"] = ctx
        # Taken out of the scope: it would tie scope and connection into a reference cycle.
        send = _noting_send(ctx, send, state.pop("body_pending", None))
        started = time.perf_counter()
        self.metrics.begin(ctx)
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            ctx.outcome = "disconnected"
        except Exception:
            log.exception("unhandled_error", request_id=ctx.id, path=ctx.path)
            if ctx.status is not None:
                ctx.outcome = "stream_error"
                raise
            await internal_error().response(ctx.path)(scope, receive, send)
        finally:
            if ctx.background is None:
                self._end(ctx, time.perf_counter() - started)
            else:
                ctx.background.add_done_callback(lambda _: self._end(ctx, time.perf_counter() - started))

    def _end(self, ctx: RequestContext, duration_s: float) -> None:
        if ctx.reservation is not None:
            self.limiter.settle_soon(ctx.reservation)
        self.metrics.end(ctx, duration_s)
        if ctx.path not in QUIET_PATHS:
            self.audit.request_ended(ctx, duration_s)
        write = log.debug if ctx.path in QUIET_PATHS else log.info
        write(
            "request",
            request_id=ctx.id,
            client_request_id=ctx.client_request_id,
            method=ctx.method,
            path=ctx.path,
            service=ctx.service.name if ctx.service else None,
            tenant=ctx.principal.tenant if ctx.principal else None,
            key_id=ctx.principal.key_id if ctx.principal else None,
            status=ctx.status,
            outcome=ctx.final_outcome(),
            stream=ctx.stream,
            duration_s=round(duration_s, 6),
            ttft_s=round(ctx.ttft_s, 6) if ctx.ttft_s is not None else None,
            prompt_tokens=ctx.prompt_tokens,
            completion_tokens=ctx.completion_tokens,
        )


def _noting_send(ctx: RequestContext, send: Send, body_pending: Callable[[], bool] | None) -> Send:
    """`body_pending` (server/connection.py) tells whether the request's body is still arriving."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            ctx.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = ctx.client_request_id or ctx.id
            if ctx.reservation is not None:
                for name, value in ctx.reservation.headers.items():
                    headers.append(name, value)
            if body_pending is not None and body_pending():
                headers["Connection"] = "close"  # the rest of the body is not waited for
        elif ctx.reservation is not None and not message.get("more_body") and ctx.background is None:
            # Before the last byte: a client that goes on at once finds its place free.
            await ctx.reservation.settle_before_the_last_byte()
        await send(message)
        if ctx.content is not None:
            ctx.content.answered(message.get("body", b""))

    return noting


def _client_request_id(scope: Scope) -> str | None:
    """The caller's X-Request-Id where it is short printable ASCII; anything else is not echoed."""
    value = Headers(scope=scope).get("x-request-id", "")
    fine = 0 < len(value) <= MAX_REQUEST_ID_CHARS and value.isascii() and value.isprintable()
    return value if fine else None


def _client(scope: Scope) -> str | None:
    """The address, where it is one: a proxy may hand on any text."""
    host = (scope.get("client") or (None,))[0]
    return host if host and len(host) <= MAX_ADDRESS_CHARS and ADDRESS.fullmatch(host) else None


class BodyTooLarge(Exception):
    """Raised from `receive` once the body has crossed the limit."""


class BodyLimit:
    """413 as soon as a body crosses its limit, declared or chunked; the connection is closed then.

    The limit is the caller's own, once a route has found out who calls, else `max_bytes`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, by_path: Mapping[str, int]) -> None:
        """`by_path`: paths with limits of their own."""
        self.app = app
        self.max_bytes = max_bytes
        self.by_path = by_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        ctx: RequestContext = scope["state"]["context"]
        declared = Headers(scope=scope).get("content-length", "")
        declared_bytes = int(declared) if declared.isdigit() else 0

        async def limited() -> Message:
            if declared_bytes > self._limit(ctx):
                raise BodyTooLarge
            message = await receive()
            if message["type"] == "http.request":
                ctx.request_bytes += len(message.get("body", b""))
                if ctx.request_bytes > self._limit(ctx):
                    raise BodyTooLarge
            return message

        try:
            await self.app(scope, limited, send)
        except BodyTooLarge:
            await self._refuse(scope, receive, send, self._limit(ctx))

    def _limit(self, ctx: RequestContext) -> int:
        return self.by_path.get(ctx.path) or body_limit(ctx.principal, self.max_bytes)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        await body_too_large(limit, close=True).response(scope["path"])(scope, receive, send)
