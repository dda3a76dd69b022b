"""The section of the settings tree that says where audit records go."""

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from server.auth_sections import STATE_AUDIT_FILE, STATE_SPOOL, state_folder
from server.sections import Section, json_value


def _names(value: Any) -> Any:
    """A list (or its JSON), or text with commas."""
    if isinstance(value, str):
        value = json_value(value) if value.startswith("[") else value.split(",")
    return tuple(part.strip() for part in value if part.strip()) if isinstance(value, list) else value


def _collector_url(value: str) -> str:
    """Scheme, host and port (and a proxy's path) of a collector; its own path is known."""
    url = urlsplit(value.rstrip("/"))
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("not an http or https URL")
    if url.username is not None or url.password is not None or url.query:
        raise ValueError("must hold neither user nor query: the token has a setting of its own")
    return url.geturl().split("/services/collector")[0]


class AuditSettings(Section):
    """The audit trail: one record for each request and each admin action."""

    file: Path | None = Field(
        default_factory=lambda: state_folder(os.environ) / STATE_AUDIT_FILE,
        description="File of records, one JSON object a line, mode 0600; null: none.",
    )
    file_max_bytes: int = Field(
        100 * 2**20, ge=2**16, description="Size in bytes at which the file is rotated (audit.jsonl.1, ...)."
    )
    file_keep: int = Field(10, ge=1, le=10_000, description="Rotated files that are kept.")
    hec_url: Annotated[str, AfterValidator(_collector_url)] | None = Field(
        None, description="Splunk HTTP Event Collector, as https://splunk:8088; unset: none."
    )
    hec_token: SecretStr | None = Field(None, description="The collector's token; best by the environment.")
    hec_ack: bool = Field(
        True, description="Ask the indexer for acknowledgement, where the token has it (at least once)."
    )
    hec_index: str | None = Field(None, min_length=1, description="Splunk index; unset: the token's own.")
    hec_sourcetype: str = Field("lapilli:audit", min_length=1, description="Splunk source type of records.")
    hec_ca_file: Path | None = Field(
        None, description="PEM file of CAs for the collector's certificate; unset: the system's."
    )
    hec_delay_s: float = Field(
        1.0, gt=0, le=60, description="Seconds a record waits for others before it is sent."
    )
    hec_batch_bytes: int = Field(
        256 * 2**10, ge=1024, le=2**26, description="Size in bytes of one delivery, before compression."
    )
    hec_timeout_s: float = Field(10.0, gt=0, description="Seconds the collector may take to answer.")
    hec_ack_timeout_s: float = Field(
        60.0, gt=0, description="Seconds without acknowledgement after which records are sent again."
    )
    spool_dir: Path = Field(
        default_factory=lambda: state_folder(os.environ) / STATE_SPOOL,
        description="Folder where records wait for the collector; each process has a part of it.",
    )
    spool_max_bytes: int = Field(
        2**28, ge=2**16, description="Most bytes each process keeps there; further records are dropped."
    )
    queue_max_bytes: int = Field(
        16 * 2**20, ge=2**16, description="Most bytes of records each process holds in memory, unwritten."
    )
    content_tenants: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (), description="Tenants whose records hold prompts and outputs too; others' never do."
    )
