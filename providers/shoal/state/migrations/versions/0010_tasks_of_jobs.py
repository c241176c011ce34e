"""Add which task of a workflow engine a job belongs to, which try of it attached last, and the log that it has shown."""

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
