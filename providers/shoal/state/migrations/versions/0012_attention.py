"""Names of flows and their tasks, and failures that a user has dismissed."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("task_name", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("dismissed_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "dismissed_at")
    op.drop_column("jobs", "task_name")
