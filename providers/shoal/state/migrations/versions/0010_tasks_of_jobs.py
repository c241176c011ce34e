"""Add a job's task in the workflow engine, the task's newest try, and how much of the log this try has shown."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("task_key", sa.Text(), nullable=True))
        jobs.add_column(sa.Column("task_try", sa.Integer(), nullable=True))
        jobs.add_column(sa.Column("log_shown", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("log_shown")
        jobs.drop_column("task_try")
        jobs.drop_column("task_key")
