"""Whether the audit trail can work with the settings, told before anything loads."""

import os
import ssl

from auth.audit_file import RotatingFile
from auth.spool import hold_own
from server.audit_sections import AuditSettings

SUPERVISOR = "supervisor"
"""Name of the process whose spool is tried, and which sends what others left behind."""


def problem(settings: AuditSettings) -> str | None:
    """Why these settings can't work, in one line; None where they can. It tries file, spool and CA file."""
    if settings.hec_url is not None and settings.hec_token is None:
        return "audit.hec_token: needed with audit.hec_url"
    if settings.hec_ca_file is not None:
        try:
            ssl.create_default_context(cafile=settings.hec_ca_file)
        except (OSError, ssl.SSLError) as error:
            return f"audit.hec_ca_file: no PEM certificates in {settings.hec_ca_file} ({error.strerror})"
    try:
        if settings.file is not None:
            RotatingFile(settings.file, settings.file_max_bytes, settings.file_keep).close()
    except OSError as error:
        return f"audit.file: can't write {settings.file}: {error.strerror}"
    try:
        if settings.hec_url is not None:
            os.close(hold_own(settings.spool_dir, SUPERVISOR)[1])
    except OSError as error:
        return f"audit.spool_dir: can't write {settings.spool_dir}: {error.strerror}"
    return None
