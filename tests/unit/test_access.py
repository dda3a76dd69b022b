"""Who gets in, by HTTP against the application in this process; the engine behind it never gets ready."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx

from auth.database import Database
from auth.identity import Identity
from auth.keys import new_key
from auth.limiter import Limiter
from auth.services import Offer, Service, Services, table_of
from auth.store import KeyStore
from auth.tenants import TenantStore
from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics
from server.app import create_app
from server.config import Settings
from server.gateway import Gateway

IN = (503, "The server is not ready: the engine is starting.")
"""What a caller gets who may call."""
TABLE = table_of(
    [Service(name="chat", scopes=["chat:write"]), Service(name="sso", auth="apikey", tenant="default")],
    Offer(("base",), tokens=False),
)


@asynccontextmanager
async def opened(url):
    settings = Settings.model_validate({"auth": {"database_url": url, "refresh_s": 0.2}})
    database = Database(url)
    await database.open()
    await database.upgrade()
    identity = Identity(settings.auth, settings.jwt)
    await identity.start()
    engine = SimpleNamespace(ready=False, reason=None, state="starting")
    services = Services(None, Offer(("base",), tokens=False), TABLE)
    metrics = RequestMetrics("base")
    limiter = Limiter(settings.limits, LimitMetrics(metrics.registry))
    app = create_app(Gateway(settings, identity, services, metrics, engine, limiter))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield client, KeyStore(database), TenantStore(database)
    finally:
        await identity.close()
        await database.close()


async def ask(client, key, prefix=""):
    answer = await client.get(f"{prefix}/v1/models", headers={"X-API-Key": key} if key else {})
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if answer.status_code == 401:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    if answer.status_code == 503:
        assert 1 <= int(answer.headers["Retry-After"]) <= 120
    return answer.status_code, error["message"]


async def until(client, key, status):
    for _ in range(100):
        found = await ask(client, key)
        if found[0] == status:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(found)


def test_missing_bad_expired_revoked_and_forbidden(sqlite_url):
    async def run():
        async with opened(sqlite_url) as (client, keys, tenants):
            key, secret = await keys.create("a")
            assert await ask(client, secret) == IN
            assert await ask(client, secret, "/services/chat") == IN
            assert (await ask(client, None))[0] == 401
            assert await ask(client, new_key()) == (401, "Incorrect API key provided.")
            await keys.revoke(key.id)
            assert await until(client, secret, 401) == (401, "Incorrect API key provided.")
            _, bound = await keys.create("b", services=["chat"], scopes=["chat:write"])
            assert await ask(client, bound, "/services/chat") == IN
            assert await ask(client, bound) == (403, "This key may not call this service.")
            _, narrow = await keys.create("c", scopes=["other"])
            assert (await ask(client, narrow, "/services/chat"))[0] == 403
            assert await ask(client, narrow, "/services/sso") == IN
            await tenants.create("acme")
            _, theirs = await keys.create("d", "acme")
            assert await ask(client, theirs) == IN
            await tenants.disable("acme")
            assert await until(client, theirs, 403) == (403, "The tenant of this key is disabled.")
            assert (await ask(client, theirs, "/services/nothing"))[0] == 404

    asyncio.run(run())


def test_database_down_is_503_for_good_and_bad_keys_and_ends_without_a_restart(postgres):
    url = postgres.url("access")

    async def run():
        async with opened(url) as (client, keys, _):
            _, secret = await keys.create("a")
            assert await ask(client, secret) == IN
            await asyncio.to_thread(postgres.stop)
            try:
                refused = (503, "Credentials can't be checked at the moment.")
                for _ in range(100):
                    if await ask(client, secret) == refused:
                        break
                    await asyncio.sleep(0.05)
                assert await ask(client, secret) == refused
                assert await ask(client, new_key()) == refused
                assert (await ask(client, None))[0] == 401
            finally:
                await asyncio.to_thread(postgres.start)
            for _ in range(200):
                if await ask(client, secret) == IN:
                    break
                await asyncio.sleep(0.05)
            assert await ask(client, secret) == IN
            assert (await ask(client, new_key()))[0] == 401

    asyncio.run(run())
