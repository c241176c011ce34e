"""Addresses of Airflow deployments."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "airflow_deployments",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("base_url", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", "base_url"),
    )


def downgrade() -> None:
    op.drop_table("airflow_deployments")
