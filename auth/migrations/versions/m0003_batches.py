"""Files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds their tables."""
    _files()
    _batches()


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("whole", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.String(32), nullable=False),
    )
    op.create_index("files_tenant", "files", ["tenant", "created_at"])
    op.create_index("files_expires_at", "files", ["expires_at"])
    op.create_table(
        "file_chunks",
        sa.Column("file", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )


def _batches() -> None:
    times = (
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
        "ended",
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(128), nullable=False),
        sa.Column("service", sa.String(64), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("input_file", sa.String(64), nullable=False),
        sa.Column("output_file", sa.String(64)),
        sa.Column("error_file", sa.String(64)),
        sa.Column("output_expires_s", sa.Integer),
        sa.Column("metadata", sa.JSON),
        sa.Column("errors", sa.JSON),
        sa.Column("status", sa.String(16), nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("total", "completed", "failed")),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.String(32), nullable=False),
        *(sa.Column(f"{name}_at", sa.String(32)) for name in times),
        sa.Column("runner", sa.String(64)),
        sa.Column("lease_until", sa.String(32)),
        sa.Column("served_at", sa.String(32)),
    )
    op.create_index("batches_tenant", "batches", ["tenant", "created_at"])
    op.create_index("batches_ended_at", "batches", ["ended_at"])
    op.create_table(
        "batch_results",
        sa.Column("batch", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("ok", sa.Boolean, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
