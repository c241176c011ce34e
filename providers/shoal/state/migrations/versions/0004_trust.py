"""hosts by id, heartbeats of drivers, digests of results, promotions; holders of any length"""

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
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("heartbeat_at", sa.Double(), nullable=True))
        jobs.add_column(sa.Column("results_digest", sa.String(length=64), nullable=True))
        jobs.add_column(sa.Column("submitter", sa.JSON(), nullable=True))
        jobs.add_column(sa.Column("asked_clock", sa.JSON(), nullable=True))
    with op.batch_alter_table("leases") as leases:
        leases.add_column(sa.Column("renewed_clock", sa.JSON(), nullable=True))
    # SQLite keeps a text of any length whatever its column says.
    if op.get_bind().dialect.name == "postgresql":
        for table in _HOLDERS:
            op.alter_column(table, "holder", type_=sa.Text(), existing_type=sa.String(length=255))


def downgrade() -> None:
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
        pools.drop_column("host_id")
