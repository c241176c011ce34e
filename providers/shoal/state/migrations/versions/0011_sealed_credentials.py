"""Add the columns through which drivers on other hosts get the credentials of their jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("needs_credentials", sa.Boolean(), nullable=True))
        jobs.add_column(sa.Column("driver_key", sa.Text(), nullable=True))
        jobs.add_column(sa.Column("sealed_credentials", sa.Text(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("sealed_credentials")
        jobs.drop_column("driver_key")
        jobs.drop_column("needs_credentials")
