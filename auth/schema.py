"""The tables of the database: tenants and keys, files and batches. auth/migrations makes them.

Times are text: UTC, ISO 8601 with milliseconds, so that they sort as they are.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

MAX_NAME_CHARS = 100
MAX_SLUG_CHARS = 64

metadata = MetaData()

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(MAX_SLUG_CHARS), primary_key=True),
    Column("service_class", String(32), nullable=False),
    Column("weight", Float, nullable=False),
    Column("limits", JSON, nullable=False),
    Column("cache_group", String(MAX_SLUG_CHARS)),
    Column("created_at", String(32), nullable=False),
    Column("disabled_at", String(32)),
    Column("changed", BigInteger, nullable=False),
)
"""`cache_group`: tenants with the same one share the prefix cache; null: alone."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(MAX_NAME_CHARS), nullable=False),
    Column("prefix", String(32), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", String(32), nullable=False),
    Column("revoked_at", String(32)),
    Column(
        "tenant",
        String(MAX_SLUG_CHARS),
        ForeignKey("tenants.name", name="api_keys_tenant_fk"),
        nullable=False,
    ),
    Column("services", JSON(none_as_null=True)),
    Column("scopes", JSON(none_as_null=True)),
    Column("limits", JSON, nullable=False),
    Column("expires_at", String(32)),
    Column("last_used_at", String(32)),
    Column("previous_hash", String(64)),
    Column("previous_expires_at", String(32)),
    Column("changed", BigInteger, nullable=False),
    Index("api_keys_previous_hash", "previous_hash"),
    Index("api_keys_changed", "changed"),
    Index("api_keys_tenant", "tenant"),
)
"""`services`, `scopes`: lists, null: all. `previous_*`: the secret before a rotation, and its end."""

auth_state = Table(
    "auth_state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("changes", BigInteger, nullable=False),
    Column("cache_secret", String(64), nullable=False),
)
"""One row. `changes` counts transactions that changed keys or tenants that may be cached; what they
changed carries the count in its `changed`, so that a cache finds by one number what it must drop."""

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(MAX_SLUG_CHARS), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("whole", Boolean, nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("expires_at", String(32), nullable=False),
    Index("files_tenant", "tenant", "created_at"),
    Index("files_expires_at", "expires_at"),
)
"""`whole`: false while it is written, and for ever where the writer died; nobody sees it then."""

file_chunks = Table(
    "file_chunks",
    metadata,
    Column("file", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)
"""The contents of files, cut anywhere."""

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(MAX_SLUG_CHARS), nullable=False),
    Column("key_id", String(128), nullable=False),
    Column("service", String(MAX_SLUG_CHARS), nullable=False),
    Column("model", String(255), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("input_file", String(64), nullable=False),
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    Column("output_expires_s", Integer),
    Column("metadata", JSON(none_as_null=True)),
    Column("errors", JSON(none_as_null=True)),
    Column("status", String(16), nullable=False),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("expires_at", String(32), nullable=False),
    Column("in_progress_at", String(32)),
    Column("finalizing_at", String(32)),
    Column("completed_at", String(32)),
    Column("failed_at", String(32)),
    Column("expired_at", String(32)),
    Column("cancelling_at", String(32)),
    Column("cancelled_at", String(32)),
    Column("ended_at", String(32)),
    Column("runner", String(64)),
    Column("lease_until", String(32)),
    Column("served_at", String(32)),
    Index("batches_tenant", "tenant", "created_at"),
    Index("batches_ended_at", "ended_at"),
)
"""`model`: what the server that took it serves; others leave it alone. `runner` works on it until
`lease_until` at least; `served_at`: when a runner last took it or let go of it."""

batch_results = Table(
    "batch_results",
    metadata,
    Column("batch", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("ok", Boolean, nullable=False),
    Column("content", LargeBinary, nullable=False),
)
"""Lines of output of batches that have not ended, by the number of the line of input: one each."""
