"""Number of the last decision about a pool's size."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("pools", sa.Column("decision", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("pools", "decision")
