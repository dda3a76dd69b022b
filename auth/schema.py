"""The tables of the database of tenants and keys. auth/migrations makes them.

Times are text: UTC, ISO 8601 with milliseconds, so that they sort as they are.
"""

from sqlalchemy import JSON, BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table

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
