"""Tenants; services, scopes, limits, expiry, last use, rotation of keys. Older keys go to `default`."""

import secrets
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the tables and columns; keeps every key."""
    tenants = op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("service_class", sa.String(32), nullable=False),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("cache_group", sa.String(64)),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("disabled_at", sa.String(32)),
        sa.Column("changed", sa.BigInteger, nullable=False),
    )
    state = op.create_table(
        "auth_state",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("cache_secret", sa.String(64), nullable=False),
    )
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    first = {"name": "default", "service_class": "standard", "weight": 1.0, "limits": {}}
    op.bulk_insert(tenants, [first | {"created_at": now, "changed": 0}])
    op.bulk_insert(state, [{"id": 1, "changes": 0, "cache_secret": secrets.token_hex(32)}])
    op.drop_index("api_keys_revoked_at", "api_keys")
    with op.batch_alter_table("api_keys") as table:
        table.add_column(sa.Column("tenant", sa.String(64), nullable=False, server_default="default"))
        table.add_column(sa.Column("services", sa.JSON))
        table.add_column(sa.Column("scopes", sa.JSON))
        table.add_column(sa.Column("limits", sa.JSON, nullable=False, server_default="{}"))
        table.add_column(sa.Column("expires_at", sa.String(32)))
        table.add_column(sa.Column("last_used_at", sa.String(32)))
        table.add_column(sa.Column("previous_hash", sa.String(64)))
        table.add_column(sa.Column("previous_expires_at", sa.String(32)))
        table.add_column(sa.Column("changed", sa.BigInteger, nullable=False, server_default="0"))
        table.create_foreign_key("api_keys_tenant_fk", "tenants", ["tenant"], ["name"])
    op.create_index("api_keys_previous_hash", "api_keys", ["previous_hash"])
    op.create_index("api_keys_changed", "api_keys", ["changed"])
    op.create_index("api_keys_tenant", "api_keys", ["tenant"])
