"""The audit record of a change made by the command line."""

import contextlib
import getpass
from collections.abc import Iterator
from typing import Any

import click

from server.audit_sections import AuditSettings

READING = frozenset({"list"})
"""Commands that change nothing."""


class Noted:
    """What a command did, filled in by who runs it."""

    result: Any = None

    @property
    def target(self) -> str | None:
        """Id of the key, or name of the tenant, that the result is."""
        found = self.result[0] if isinstance(self.result, tuple) else self.result
        return getattr(found, "id", None) or getattr(found, "name", None)


@contextlib.contextmanager
def noted(ctx: click.Context, settings: AuditSettings) -> Iterator[Noted]:
    """Writes one record of what happens within, failures too; `keys revoke` is the action `keys.revoke`.

    A trail that can't be written is told on stderr; the command goes on.
    """
    what = Noted()
    outcome = "failed"
    try:
        yield what
        outcome = "ok"
    finally:
        if ctx.info_name not in READING:
            try:
                _write(settings, ".".join(ctx.command_path.split()[1:]), what.target, outcome)
            except OSError as error:
                click.echo(f"lapilli: the audit record was not written: {error.strerror}", err=True)


def _write(settings: AuditSettings, action: str, target: str | None, outcome: str) -> None:
    # Here, not above: the other commands need not load the HTTP client.
    from auth.audit import AuditLog
    from auth.audit_records import admin_record

    audit = AuditLog(settings, "cli")
    audit.open()
    audit.write_now(admin_record(action, target, actor=f"cli:{_user()}", outcome=outcome))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in many containers
        return "unknown"
