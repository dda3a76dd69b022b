"""/admin: tenants, keys and services, on the admin port alone, for the holder of the admin credential."""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
import structlog
from fastapi import APIRouter, Depends, Request, Response

from auth.database import Database
from auth.errors import BadCredentials, KeyStoreUnavailable
from auth.keys import parse_credentials
from auth.principal import DEFAULT_TENANT
from auth.records import KeyIsDead, TenantExists, UnknownKey, UnknownTenant
from auth.services import Services
from auth.store import DEFAULT_OVERLAP_S, KeyStore
from auth.tenants import TenantStore
from server.errors import ApiError, body_too_large, unauthorized, unavailable

log = structlog.get_logger()

MAX_BODY_BYTES = 64 * 1024
ACTOR = "admin-api"

Note = Callable[[str, str, str], None]
"""Told of each change: what was done (`keys.revoke`), to what (its id), and how it ended (`ok` or a code)."""

_FAILURES: dict[type[Exception], tuple[int, str, str]] = {
    UnknownKey: (404, "No API key has this id.", "not_found"),
    UnknownTenant: (404, "No tenant has this name.", "not_found"),
    TenantExists: (409, "A tenant of this name exists already.", "conflict"),
    KeyIsDead: (409, "The API key is revoked or expired.", "conflict"),
}


def log_action(action: str, target: str, outcome: str) -> None:
    """The least that is kept of an admin action: a line in the log."""
    log.info("admin_action", actor=ACTOR, action=action, target=target, outcome=outcome)


def admin_router(database: Database, services: Services, token: str, note: Note = log_action) -> APIRouter:
    """The admin API over the database, open to who sends `Authorization: Bearer <token>`."""

    def check(request: Request) -> None:
        try:
            given = parse_credentials(request.headers.raw)
        except BadCredentials as error:
            raise unauthorized(str(error)) from None
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise unauthorized("Incorrect admin credential provided.")

    router = APIRouter(prefix="/admin", dependencies=[Depends(check)])
    _add_tenants(router, TenantStore(database), note)
    _add_keys(router, KeyStore(database), note)

    @router.get("/services")
    async def list_services() -> Response:
        """The services in force."""
        return _answer({"data": [service.shown() for service in services.table.services]})

    return router


def _add_tenants(router: APIRouter, store: TenantStore, note: Note) -> None:
    @router.get("/tenants")
    async def list_tenants() -> Response:
        """All tenants."""
        found = await _done(store.list)
        return _answer({"data": [asdict(tenant) for tenant in found]})

    @router.post("/tenants")
    async def create_tenant(request: Request) -> Response:
        """Creates a tenant: `name`, `service_class`, `weight`, `limits`, `cache_group`."""
        fields = await _fields(request)
        name = fields.pop("name", None)
        tenant = await _noted(note, "tenants.create", name, lambda: store.create(name, **fields))
        return _answer(asdict(tenant), 201)

    @router.patch("/tenants/{name}")
    async def change_tenant(request: Request, name: str) -> Response:
        """Sets what the body gives; the rest stays."""
        fields = await _fields(request)
        tenant = await _noted(note, "tenants.change", name, lambda: store.change(name, **fields))
        return _answer(asdict(tenant))

    @router.post("/tenants/{name}/disable")
    async def disable_tenant(name: str) -> Response:
        """Refuses all its requests."""
        return _answer(asdict(await _noted(note, "tenants.disable", name, lambda: store.disable(name))))

    @router.post("/tenants/{name}/enable")
    async def enable_tenant(name: str) -> Response:
        """Takes its requests again."""
        return _answer(asdict(await _noted(note, "tenants.enable", name, lambda: store.enable(name))))


def _add_keys(router: APIRouter, store: KeyStore, note: Note) -> None:
    @router.get("/keys")
    async def list_keys(tenant: str | None = None) -> Response:
        """All keys, or a tenant's, without their secrets."""
        found = await _done(lambda: store.list(tenant))
        return _answer({"data": [asdict(key) for key in found]})

    @router.post("/keys")
    async def create_key(request: Request) -> Response:
        """Creates a key: `name`, `tenant`, `services`, `scopes`, `limits`, `expires_at`; shows its secret."""
        fields = await _fields(request)
        name, tenant = fields.pop("name", "unnamed"), fields.pop("tenant", DEFAULT_TENANT)
        key, secret = await _noted(note, "keys.create", tenant, lambda: store.create(name, tenant, **fields))
        return _answer({**asdict(key), "key": secret}, 201)

    @router.patch("/keys/{key_id}")
    async def change_key(request: Request, key_id: str) -> Response:
        """Sets what the body gives; the rest stays."""
        fields = await _fields(request)
        return _answer(
            asdict(await _noted(note, "keys.change", key_id, lambda: store.change(key_id, **fields)))
        )

    @router.post("/keys/{key_id}/rotate")
    async def rotate_key(request: Request, key_id: str) -> Response:
        """A new secret, shown once; the old one stays good for `overlap_s` seconds."""
        fields = await _fields(request)
        overlap_s = fields.pop("overlap_s", DEFAULT_OVERLAP_S)
        if fields or type(overlap_s) not in (int, float):
            raise ApiError(400, "The body holds overlap_s, a number of seconds, and nothing else.")
        key, secret = await _noted(note, "keys.rotate", key_id, lambda: store.rotate(key_id, overlap_s))
        return _answer({**asdict(key), "key": secret})

    @router.post("/keys/{key_id}/revoke")
    async def revoke_key(key_id: str) -> Response:
        """Ends the key for good."""
        return _answer(asdict(await _noted(note, "keys.revoke", key_id, lambda: store.revoke(key_id))))


async def _noted(note: Note, action: str, target: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` gives, noted however it ends."""
    outcome = "failed"
    try:
        result = await _done(work)
        target = getattr(result[0] if isinstance(result, tuple) else result, "id", target)
        outcome = "ok"
        return result
    except ApiError as error:
        outcome = error.code or str(error.status)
        raise
    finally:
        note(action, target if isinstance(target, str) else "", outcome)


async def _done(work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` gives; its failures as answers."""
    try:
        return await work()
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message[:1].upper() + message[1:] + ".", code="invalid_value") from None
    except KeyStoreUnavailable as error:
        log.error("key_database_unavailable", reason=str(error))
        raise unavailable("The database can't be used at the moment.", retry_after_s=5) from None
    except tuple(_FAILURES) as error:
        status, message, code = _FAILURES[type(error)]
        raise ApiError(status, message, code=code) from None


async def _fields(request: Request) -> dict[str, Any]:
    """The body as a JSON object; none is an empty one."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise body_too_large(MAX_BODY_BYTES, close=True)
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return fields


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    # An answer may hold a secret: no cache keeps it.
    return Response(orjson.dumps(content), status, {"Cache-Control": "no-store"}, "application/json")
