"""Add the table of the nodes that leases and jobs have used, limits of leases and teams, and announced ends of nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.String(length=255).with_variant(sa.Text(), "postgresql"), nullable=False),
        sa.Column("lease_id", sa.String(length=255), nullable=True),
        sa.Column("job_id", sa.String(length=255), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("begun_at", sa.Double(), nullable=False),
        sa.Column("begun_clock", sa.JSON(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("node_seconds", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.Column("team", sa.String(length=255), nullable=True),
    )
    op.create_index("ix_usage_pool", "usage", ["pool", "ended_at"])
    op.create_index("ix_usage_job", "usage", ["job_id", "attempt"])
    op.create_index("ix_usage_lease", "usage", ["lease_id"])
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("max_lifetime", sa.Double(), nullable=True))
        leases.add_column(sa.Column("budget_node_hours", sa.Double(), nullable=True))
        leases.add_column(sa.Column("team", sa.String(length=255), nullable=True))
    with op.batch_alter_table("pools") as pools:
        pools.add_column(sa.Column("quotas", sa.JSON(), nullable=True))
    with op.batch_alter_table("nodes") as nodes:
        nodes.add_column(sa.Column("leaving_at", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.drop_column("leaving_at")
    with op.batch_alter_table("pools") as pools:
        pools.drop_column("quotas")
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("team")
        leases.drop_column("budget_node_hours")
        leases.drop_column("max_lifetime")
    op.drop_table("usage")
