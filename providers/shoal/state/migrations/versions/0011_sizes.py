"""The sizes that a pool has had, and the time at which its nodes were last checked."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "sizes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("pool", sa.String(255), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("ready", sa.Integer(), nullable=True),
        sa.Column("target", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sizes_pool", "sizes", ["pool"])
    op.add_column("pools", sa.Column("seen_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("pools", "seen_at")
    op.drop_table("sizes")
