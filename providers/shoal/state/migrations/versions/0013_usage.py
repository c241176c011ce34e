"""Add the record of how many nodes leases and jobs have used, and for how long."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.String(length=255), nullable=True),
        sa.Column("job_id", sa.String(length=255), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("begun_at", sa.Double(), nullable=False),
        sa.Column("begun_clock", sa.JSON(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("node_seconds", sa.Double(), nullable=True),
    )
    op.create_index("ix_usage_pool", "usage", ["pool", "ended_at"])
    op.create_index("ix_usage_job", "usage", ["job_id", "attempt"])


def downgrade() -> None:
    op.drop_table("usage")
