"""Add a table for result files of jobs, for pools that share no file system with the processes that submit jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("path", sa.Text(), primary_key=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("files")
