"""Count a pool's node failures in a row, and store the last error."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("pools") as pools:
        pools.add_column(sa.Column("start_failures", sa.Integer(), nullable=False, server_default="0"))
        pools.add_column(sa.Column("last_failure", sa.String(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("pools") as pools:
        pools.drop_column("last_failure")
        pools.drop_column("start_failures")
