"""Journals of searches for parameters."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "study_logs",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("study", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "study", "number"),
    )


def downgrade() -> None:
    op.drop_table("study_logs")
