"""What a task that has submitted a job runs, and the run of the task."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("task_digest", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("task_run", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "task_run")
    op.drop_column("jobs", "task_digest")
