"""Versions of the tables that a job reads."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("versions", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "versions")
