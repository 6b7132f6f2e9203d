"""Sessions, adapters, checkpoints, snapshots."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _artifact_columns() -> list[sa.Column]:
    return [
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("adapter_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
    ]


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), primary_key=True),
        sa.Column("client_key", sa.String(), nullable=False, unique=True),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
    )
    op.create_table(
        "adapters",
        sa.Column("adapter_id", sa.String(), primary_key=True),
        sa.Column("client_key", sa.String(), nullable=False, unique=True),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False, index=True),
        sa.Column("last_used_at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("latest_version", sa.BigInteger(), nullable=False),
    )
    op.create_table("checkpoints", *_artifact_columns())
    op.create_index("ix_checkpoints_name", "checkpoints", ["adapter_id", "name"], unique=True)
    op.create_table("snapshots", *_artifact_columns(), sa.Column("version", sa.BigInteger(), nullable=False))
    op.create_index("ix_snapshots_version", "snapshots", ["adapter_id", "version"], unique=True)


def downgrade() -> None:
    for table in ("snapshots", "checkpoints", "adapters", "sessions"):
        op.drop_table(table)
