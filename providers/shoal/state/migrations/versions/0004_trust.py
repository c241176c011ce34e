"""Add host ids, heartbeats of drivers, digests of results and promotions, and allow holders of any length."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_HOLDERS = ("leases", "operations", "jobs", "locks")


def upgrade() -> None:
    with op.batch_alter_table("pools") as pools:
        pools.add_column(sa.Column("host_id", sa.String(length=255), nullable=True))
        pools.add_column(sa.Column("clock", sa.JSON(), nullable=True))
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("heartbeat_at", sa.Double(), nullable=True))
        jobs.add_column(sa.Column("results_digest", sa.String(length=64), nullable=True))
        jobs.add_column(sa.Column("submitter", sa.JSON(), nullable=True))
        jobs.add_column(sa.Column("asked_clock", sa.JSON(), nullable=True))
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("renewed_clock", sa.JSON(), nullable=True))
    # SQLite does not enforce the length of a text column.
    if op.get_bind().dialect.name == "postgresql":
        for table in _HOLDERS:
            op.alter_column(table, "holder", type_=sa.Text(), existing_type=sa.String(length=255))
    _create_promotions()


def _create_promotions() -> None:
    op.create_table(
        "promotions",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("registry_uri", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("version", sa.String(length=255), nullable=False),
        sa.Column("previous", sa.String(length=255), nullable=True),
        sa.Column("metric", sa.String(length=255), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("holdout_digest", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("confirmed_at", sa.Double(), nullable=True),
    )
    op.create_index("ix_promotions_alias", "promotions", ["registry_uri", "model", "alias"])


def downgrade() -> None:
    op.drop_table("promotions")
    if op.get_bind().dialect.name == "postgresql":
        for table in _HOLDERS:
            op.alter_column(table, "holder", type_=sa.String(length=255), existing_type=sa.Text())
    with op.batch_alter_table("leases") as leases:
        leases.drop_column("renewed_clock")
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("asked_clock")
        jobs.drop_column("submitter")
        jobs.drop_column("results_digest")
        jobs.drop_column("heartbeat_at")
    with op.batch_alter_table("pools") as pools:
        pools.drop_column("clock")
        pools.drop_column("host_id")
