"""What a job is about, for lists of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("label", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "label")
