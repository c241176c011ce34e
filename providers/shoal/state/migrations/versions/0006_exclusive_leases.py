"""Add exclusive leases, and the order in which waiting leases are granted."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("exclusive", sa.Boolean(), nullable=False, server_default=sa.false()))
        leases.add_column(sa.Column("waiting", sa.Boolean(), nullable=False, server_default=sa.false()))
        leases.add_column(sa.Column("queue_number", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("queue_number")
        leases.drop_column("waiting")
        leases.drop_column("exclusive")
