"""Holders whose end is also the end of a job or lease."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for table in ("jobs", "leases"):
        op.add_column(table, sa.Column("ancestors", sa.JSON(), nullable=True))


def downgrade() -> None:
    for table in ("jobs", "leases"):
        op.drop_column(table, "ancestors")
