"""What auth, limits and audit add to a request: the application's layers, in process, over an idle engine.

Two applications take the same requests in turns, one with keys, limits (of every kind) and audit on, one
without. The difference of their medians is what a request pays before and after the engine.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from auth.audit import AuditLog
from auth.database import Database
from auth.identity import Identity
from auth.limiter import Limiter
from auth.principal import Limits, Principal
from auth.services import Offer, Service, Services
from auth.store import KeyStore
from benchmarks.redis_server import RedisServer
from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics
from server.app import create_app
from server.audit_sections import AuditSettings
from server.auth_sections import AuthSettings, JwtSettings, LimitsSettings
from server.config import Settings
from server.context import RequestContext
from server.gateway import Gateway
from server.limits import take_tokens

NUM_ROUNDS = 6
NUM_REQUESTS = 500
"""In each round; the first round is not counted."""
MANY = 10**9
ALL_LIMITS = {
    "requests_per_s": 5000, "requests_per_min": MANY, "tokens_per_min": MANY, "parallel_requests": MANY,
    "tokens_per_day": MANY, "tokens_per_month": MANY,
}  # fmt: skip
CALLER = Principal("default", "key", "key", tenant_limits=Limits(requests_per_s=None))


async def _chat(_body: bytes, ctx: RequestContext) -> bytes:
    """In the place of the protocol and the engine."""
    await take_tokens(ctx, 100, 200, 200)
    ctx.prompt_tokens, ctx.completion_tokens = 100, 50
    return b"{}"


class _Anyone:
    """In the place of identity: everybody is the same caller."""

    async def identify(self, _headers: Any, _service: Service) -> Principal:
        return CALLER


def _application(identity: Any, limits: LimitsSettings, audit: AuditLog) -> tuple[Any, Limiter]:
    metrics = RequestMetrics("m")
    limiter = Limiter(limits, LimitMetrics(CollectorRegistry()))
    engine: Any = SimpleNamespace(ready=True, reason=None, track=lambda _ctx: None)
    services = Services(None, Offer(("m",), tokens=False))
    gateway = Gateway(Settings(), identity, services, metrics, audit, engine, limiter)
    gateway.protocol = SimpleNamespace(chat=_chat)  # type: ignore[assignment]
    return create_app(gateway), limiter


async def _request_s(app: Any, key: str) -> float:
    """Seconds that one chat request takes, without a connection."""
    headers = [(b"authorization", b"Bearer " + key.encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "scheme": "http",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "headers": headers,
    }
    statuses = []
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status"))

    started = time.perf_counter()
    await app(scope, receive, send)
    taken_s = time.perf_counter() - started
    assert statuses[0] == 200, statuses
    return taken_s


async def _first_key(auth: AuthSettings) -> str:
    database = Database(auth.database_url)
    await database.open()
    try:
        await database.upgrade()
        return await KeyStore(database).ensure_first_key() or ""
    finally:
        await database.close()


async def added_us(store: str, redis_url: str) -> float:
    """Microseconds at the median that auth, limits and audit add to a request."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        auth = AuthSettings(database_url=f"sqlite+aiosqlite:///{folder}/keys.db")
        key = await _first_key(auth)
        identity = Identity(auth, JwtSettings())
        await identity.start()
        stack.push_async_callback(identity.close)
        limits = LimitsSettings(store=store, redis_url=redis_url, **ALL_LIMITS)  # type: ignore[arg-type]
        audit = AuditLog(AuditSettings(file=Path(folder) / "audit.jsonl"), "worker-1")
        audit.open()
        audit.start()
        stack.push_async_callback(audit.close)
        full, limiter = _application(identity, limits, audit)
        stack.push_async_callback(limiter.close)
        bare, _ = _application(_Anyone(), LimitsSettings(store="none"), AuditLog(AuditSettings(), "worker-1"))
        medians: dict[str, list[float]] = {"full": [], "bare": []}
        for _ in range(NUM_ROUNDS + 1):
            times: dict[str, list[float]] = {"full": [], "bare": []}
            for _ in range(NUM_REQUESTS):
                for name, app in (("full", full), ("bare", bare)):
                    times[name].append(await _request_s(app, key))
            for name, taken in times.items():
                medians[name].append(statistics.median(taken))
    # Of the rounds the least disturbed by others on this machine.
    return (min(medians["full"][1:]) - min(medians["bare"][1:])) * 1e6


def measure() -> dict[str, float | None]:
    """`added_p50_us_memory` and `added_p50_us_redis` (None without a redis-server)."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))

    memory = uvloop.run(added_us("memory", "redis://127.0.0.1:1/0"))
    shared = None
    if shutil.which("redis-server") is not None:
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(RedisServer(Path(folder), durable=False)) as redis,
        ):
            shared = uvloop.run(added_us("redis", redis.url))
    return {
        "added_p50_us_memory": round(memory, 1),
        "added_p50_us_redis": None if shared is None else round(shared, 1),
    }
