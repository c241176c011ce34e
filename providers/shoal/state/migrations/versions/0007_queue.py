"""Add columns for jobs that wait in a pool's queue: priority, workers, and the times of joining and leaving it."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("priority", sa.Integer(), nullable=True))
        jobs.add_column(sa.Column("gang", sa.JSON(), nullable=True))
        jobs.add_column(sa.Column("queued_at", sa.Double(), nullable=True))
        jobs.add_column(sa.Column("queued_clock", sa.JSON(), nullable=True))
        jobs.add_column(sa.Column("admitted_at", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        for column in ("admitted_at", "queued_clock", "queued_at", "gang", "priority"):
            jobs.drop_column(column)
