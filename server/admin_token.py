"""The credential of the admin API, from the settings. Apart from admin.py, which is imported later."""

from server.config import Settings
from server.config_sources import SettingsError

MIN_TOKEN_CHARS = 16


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
