"""The application of the admin port: health and metrics of all, and the admin API where it is on."""

from collections.abc import Callable

from fastapi import FastAPI

from auth.audit import AuditLog
from auth.audit_records import admin_record
from auth.database import Database
from auth.services import Services
from server import __version__, errors
from server.admin_token import admin_token
from server.config import Settings
from server.health import Health
from server.routes.admin import ACTOR, admin_router, log_action
from server.routes.health import health_router


def create_admin_app(
    settings: Settings,
    health: Callable[[], Health],
    database: Database,
    services: Services,
    audit: AuditLog,
) -> FastAPI:
    """The application; `database` is open. Without an admin credential there is no admin API."""
    app = FastAPI(title="Lapilli admin", version=__version__, openapi_url=None, redirect_slashes=False)
    errors.install(app)
    app.include_router(health_router(settings, health))
    token = admin_token(settings)
    if token is not None:

        def note(action: str, target: str, outcome: str) -> None:
            log_action(action, target, outcome)
            audit.emit(admin_record(action, target or None, actor=ACTOR, outcome=outcome))

        app.include_router(admin_router(database, services, token, note))
    return app
