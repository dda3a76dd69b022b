"""The admin API over a real database, in this process: who may call it, what it does, bad input."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
import structlog

from auth.audit import AuditLog
from auth.cache import KeyCache
from auth.database import Database
from auth.services import Offer, Services
from server.admin import create_admin_app
from server.admin_token import admin_token
from server.audit_sections import AuditSettings
from server.config import Settings
from server.config_sources import SettingsError
from server.health import Health

TOKEN = "an-admin-credential-of-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def opened(url, trail=None, **admin):
    database = Database(url)
    await database.open()
    await database.upgrade()
    settings = Settings.model_validate({"admin": {"token": TOKEN} | admin})
    services = Services(None, Offer(("base",), tokens=False))
    audit = AuditLog(AuditSettings(file=trail), "supervisor")
    audit.open()
    audit.start()
    app = create_admin_app(
        settings, lambda: Health(ready=True, state="ready", reason=None), database, services, audit
    )
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=HEADERS) as client:
            yield client, database
    finally:
        await audit.close()
        await database.close()


def test_tenants_and_keys_from_first_to_last(url):
    async def run():
        async with opened(url) as (client, database):
            made = await client.post(
                "/admin/tenants", json={"name": "acme", "weight": 2, "limits": {"tokens_per_min": 9}}
            )
            assert (made.status_code, made.json()["weight"]) == (201, 2.0)
            names = [tenant["name"] for tenant in (await client.get("/admin/tenants")).json()["data"]]
            assert names == ["acme", "default"]
            changed = await client.patch("/admin/tenants/acme", json={"service_class": "batch", "limits": {}})
            assert (changed.json()["service_class"], changed.json()["limits"]) == ("batch", {})
            key = (
                await client.post("/admin/keys", json={"tenant": "acme", "name": "ci", "services": ["chat"]})
            ).json()
            cache = KeyCache(database, refresh_s=0.001)
            assert (await cache.authenticate(key["key"])).key_id == key["id"]
            listed = (await client.get("/admin/keys", params={"tenant": "acme"})).json()["data"]
            assert listed == [{name: value for name, value in key.items() if name != "key"}]
            assert (await client.patch(f"/admin/keys/{key['id']}", json={"services": None})).json()[
                "services"
            ] is None
            rotated = (await client.post(f"/admin/keys/{key['id']}/rotate", json={"overlap_s": 0})).json()
            await asyncio.sleep(0.01)
            assert await cache.authenticate(key["key"]) is None
            assert await cache.authenticate(rotated["key"])
            assert (await client.post("/admin/tenants/acme/disable")).json()["disabled_at"]
            assert (await client.post("/admin/tenants/acme/enable")).json()["disabled_at"] is None
            assert (await client.post(f"/admin/keys/{key['id']}/revoke")).json()["revoked_at"]
            await asyncio.sleep(0.01)
            assert await cache.authenticate(rotated["key"]) is None
            services = (await client.get("/admin/services")).json()["data"]
            assert [service["endpoint"] for service in services] == ["/"]

    asyncio.run(run())


BAD = [
    ("POST", "/admin/tenants", b"{", 400, "invalid_json"),
    ("POST", "/admin/tenants", b"[]", 400, "invalid_json"),
    ("POST", "/admin/tenants", b"{}", 400, "invalid_value"),
    ("POST", "/admin/tenants", b'{"name": ["a"]}', 400, "invalid_value"),
    ("POST", "/admin/tenants", b'{"name": "a", "self": 1}', 400, "invalid_value"),
    ("POST", "/admin/tenants", b'{"name": "a", "weight": "heavy"}', 400, "invalid_value"),
    ("POST", "/admin/tenants", b'{"name": "a", "limits": {"requests_per_s": 1}}', 400, "invalid_value"),
    ("POST", "/admin/tenants", b'{"name": "default"}', 409, "conflict"),
    ("POST", "/admin/tenants", b'{"name": "' + b"a" * 70_000 + b'"}', 413, "request_too_large"),
    ("PATCH", "/admin/tenants/nobody", b"{}", 404, "not_found"),
    ("PATCH", "/admin/tenants/default", b'{"name": "b"}', 400, "invalid_value"),
    ("POST", "/admin/tenants/nobody/disable", b"", 404, "not_found"),
    ("POST", "/admin/keys", b'{"tenant": "nobody"}', 404, "not_found"),
    ("POST", "/admin/keys", b'{"tenant": {"a": 1}}', 400, "invalid_value"),
    ("POST", "/admin/keys", b'{"name": 5}', 400, "invalid_value"),
    ("POST", "/admin/keys", b'{"id": "key_mine"}', 400, "invalid_value"),
    ("POST", "/admin/keys", b'{"hash": "0"}', 400, "invalid_value"),
    ("POST", "/admin/keys", b'{"expires_at": 5}', 400, "invalid_value"),
    ("POST", "/admin/keys/key_none/rotate", b"", 404, "not_found"),
    ("POST", "/admin/keys/key_none/rotate", b'{"overlap_s": "1"}', 400, None),
    ("POST", "/admin/keys/key_none/rotate", b'{"overlap_s": -1}', 400, "invalid_value"),
    ("POST", "/admin/keys/key_none/revoke", b"", 404, "not_found"),
    ("DELETE", "/admin/keys/key_none", b"", 405, "method_not_allowed"),
    ("GET", "/admin/nothing", b"", 404, "not_found"),
]


def test_bad_input_is_one_error_of_openais_shape(sqlite_url):
    async def run():
        async with opened(sqlite_url) as (client, _):
            for method, path, body, status, code in BAD:
                answer = await client.request(method, path, content=body)
                assert answer.status_code == status, (path, body, answer.text)
                error = answer.json()["error"]
                assert (error["code"], set(error)) == (code, {"message", "type", "param", "code"})
                assert "\n" not in error["message"]
            key = (await client.post("/admin/keys", json={})).json()
            assert key["name"] == "unnamed"
            await client.post(f"/admin/keys/{key['id']}/revoke")
            assert (await client.patch(f"/admin/keys/{key['id']}", json={"name": "x"})).status_code == 409

    asyncio.run(run())


def test_its_own_credential_and_no_other(sqlite_url):
    async def run():
        async with opened(sqlite_url) as (client, _):
            key = (await client.post("/admin/keys", json={})).json()["key"]
            for headers in ({}, {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {TOKEN}x"},
                            {"Authorization": "Basic " + TOKEN}, {"X-API-Key": key}):  # fmt: skip
                for method, path in (
                    ("GET", "/admin/keys"),
                    ("POST", "/admin/keys"),
                    ("GET", "/admin/services"),
                ):
                    client.headers.pop("Authorization", None)
                    answer = await client.request(method, path, headers=headers, content=b"{")
                    assert answer.status_code == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await client.get("/livez")).status_code == 200
        async with opened(sqlite_url, token=None) as (client, _):
            for path in ("/admin/keys", "/admin/tenants", "/admin/services"):
                assert (await client.get(path)).status_code == 404, "off"

    asyncio.run(run())


def test_each_change_is_noted_and_no_secret_with_it(sqlite_url):
    async def run():
        async with opened(sqlite_url) as (client, _):
            with structlog.testing.capture_logs() as logs:
                key = (await client.post("/admin/keys", json={"name": "a"})).json()
                await client.post(f"/admin/keys/{key['id']}/revoke")
                await client.post("/admin/keys/key_none/revoke")
                await client.get("/admin/keys")
            noted = [(e["action"], e["target"], e["outcome"]) for e in logs if e["event"] == "admin_action"]
            assert noted == [
                ("keys.create", key["id"], "ok"),
                ("keys.revoke", key["id"], "ok"),
                ("keys.revoke", "key_none", "not_found"),
            ]
            assert key["key"] not in str(logs)
            assert TOKEN not in str(logs)

    asyncio.run(run())


def test_a_database_that_is_down_is_503(postgres):
    url = postgres.url("admin_down")

    async def run():
        async with opened(url) as (client, _):
            await asyncio.to_thread(postgres.stop)
            try:
                for method, path in (
                    ("GET", "/admin/keys"),
                    ("POST", "/admin/keys"),
                    ("GET", "/admin/tenants"),
                ):
                    answer = await client.request(method, path)
                    assert answer.status_code == 503
                    assert int(answer.headers["Retry-After"]) >= 1
            finally:
                await asyncio.to_thread(postgres.start)
            assert (await client.get("/admin/keys")).status_code == 200

    asyncio.run(run())


def test_the_credential_in_the_settings(tmp_path):
    def token(**admin):
        return admin_token(Settings.model_validate({"admin": admin}))

    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert token() is None
    assert token(token=TOKEN) == token(token_file=file) == TOKEN
    texts = ("short", "a" * 20 + " b", "é" * 20)
    files = (tmp_path / "none", tmp_path)
    bad = [{"token": text} for text in texts] + [{"token_file": path} for path in files]
    bad.append({"token": TOKEN, "token_file": file})
    for admin in bad:
        with pytest.raises(SettingsError) as caught:
            token(**admin)
        assert "\n" not in str(caught.value)
        assert TOKEN not in str(caught.value)


def test_each_change_is_audited(url, tmp_path):
    """What was done, to what, how it ended; no secret; what only reads leaves nothing."""
    trail = tmp_path / "audit.jsonl"

    async def run():
        async with opened(url, trail) as (client, _):
            key = (await client.post("/admin/keys", json={"name": "ci"})).json()
            await client.get("/admin/keys")
            await client.post(f"/admin/keys/{key['id']}/revoke")
            await client.post("/admin/keys/key_nobody/revoke")
            return key

    key = asyncio.run(run())
    records = [json.loads(line) for line in trail.read_text().splitlines()]
    assert [(r["event"], r["actor"], r["action"], r["target"], r["outcome"]) for r in records] == [
        ("admin", "admin-api", "keys.create", key["id"], "ok"),
        ("admin", "admin-api", "keys.revoke", key["id"], "ok"),
        ("admin", "admin-api", "keys.revoke", "key_nobody", "not_found"),
    ]
    assert key["key"] not in trail.read_text()
