"""Store the time to live of each lease, so that every renewal adds the same time."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("ttl", sa.Double(), nullable=False, server_default="900"))


def downgrade() -> None:
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("ttl")
