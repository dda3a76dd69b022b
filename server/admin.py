"""The application of the admin port: health and metrics of all, and the admin API where it is on."""

from collections.abc import Callable

from fastapi import FastAPI

from auth.audit import AuditLog
from auth.audit_records import admin_record
from auth.database import Database
from auth.services import Services
from server import __version__, errors
from server.config import Settings
from server.config_sources import SettingsError
from server.health import Health
from server.routes.admin import ACTOR, admin_router, log_action
from server.routes.health import health_router

MIN_TOKEN_CHARS = 16


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


def admin_token(settings: Settings) -> str | None:
    """The admin credential, None where none is set. Raises SettingsError, which does not quote it."""
    token, file = settings.admin.token, settings.admin.token_file
    if token is not None and file is not None:
        raise SettingsError("admin.token and admin.token_file: set one of them")
    if file is not None:
        try:
            token = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
            raise SettingsError(f"admin.token_file: {file}: cannot be read ({reason})") from None
    if token is None:
        return None
    fine = token.isascii() and token.isprintable() and " " not in token
    if len(token) < MIN_TOKEN_CHARS or not fine:
        raise SettingsError(
            f"the admin credential has at least {MIN_TOKEN_CHARS} printable characters, no space"
        )
    return token
