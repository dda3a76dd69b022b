"""What an audit record holds: who, what, when, how much, how it ended."""

import os
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from auth.redaction import redact_text
from server.context import RequestContext

MAX_TEXT_CHARS = 256


def request_record(ctx: RequestContext, duration_s: float, process: str) -> dict[str, Any]:
    """The record of a request that has ended. Times are seconds, sizes bytes and tokens; None: not known."""
    principal = ctx.principal
    record: dict[str, Any] = {
        "event_id": ctx.id,
        "event": "request",
        "time": _utc(time.time() - duration_s),
        "tenant": principal.tenant if principal else None,
        "key_id": principal.key_id if principal else None,
        "service": ctx.service.name if ctx.service else None,
        "service_class": principal.service_class if principal else None,
        "client": ctx.client,
        "client_request_id": _short(ctx.client_request_id),
        "method": ctx.method,
        "path": _short(ctx.path),
        "model": ctx.model,
        "status": ctx.status,
        "outcome": ctx.final_outcome(),
        "stream": ctx.stream,
        "request_bytes": ctx.request_bytes,
        "prompt_tokens": ctx.prompt_tokens,
        "completion_tokens": ctx.completion_tokens,
        "duration_s": _rounded(duration_s),
        "ttft_s": _rounded(ctx.ttft_s),
        "tpot_s": _rounded(ctx.tpot_s),
        "queue_s": _rounded(ctx.queue_s),
        "prefill_s": _rounded(ctx.prefill_s),
        "decode_s": _rounded(ctx.decode_s),
        "process": process,
        "pid": os.getpid(),
    }
    if ctx.content is not None:
        record["content"] = ctx.content.fields()
    return record


def admin_record(
    action: str,
    target: str | None,
    *,
    actor: str,
    outcome: str = "ok",
    details: Mapping[str, Any] | None = None,
    client: str | None = None,
) -> dict[str, Any]:
    """The record of an admin action, as `keys.revoke` of `key_0123`.

    `actor`: who did it, as `cli:USER` or the admin API's credential id. `details` must hold no secret.
    """
    return {
        "event_id": uuid.uuid4().hex,
        "event": "admin",
        "time": _utc(time.time()),
        "actor": _short(actor),
        "action": action,
        "target": _short(target),
        "outcome": outcome,
        "client": client,
        "details": dict(details or {}),
        "pid": os.getpid(),
    }


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _short(text: str | None) -> str | None:
    """A client's word, without what looks like a secret, and not longer than it needs to be."""
    return None if text is None else redact_text(text[:MAX_TEXT_CHARS])
