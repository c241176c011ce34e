"""Create the tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("path"),
    )
    op.create_table(
        "history",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "created",
                "started",
                "scaled",
                "leased",
                "released",
                "altered",
                "stopped",
                "deleted",
                "cancelled",
                "swept",
                "promoted",
                name="actionkind",
                native_enum=False,
                length=20,
            ),
            nullable=False,
        ),
        sa.Column("pool", sa.String(length=255), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("operation_id", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("history", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_history_operation_id"), ["operation_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_history_pool"), ["pool"], unique=False)

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "pending", "running", "succeeded", "failed", "cancelled", name="jobstate", native_enum=False, length=20
            ),
            nullable=False,
        ),
        sa.Column("endpoint", sa.JSON(), nullable=False),
        sa.Column("driver", sa.JSON(), nullable=True),
        sa.Column("submitter", sa.JSON(), nullable=False),
        sa.Column("task_key", sa.Text(), nullable=True),
        sa.Column("task_try", sa.Integer(), nullable=True),
        sa.Column("log_shown", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("gang", sa.JSON(), nullable=False),
        sa.Column("uses_gpu", sa.Boolean(), nullable=True),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("queued_clock", sa.JSON(), nullable=True),
        sa.Column("admitted_at", sa.Double(), nullable=True),
        sa.Column("needs_credentials", sa.Boolean(), nullable=False),
        sa.Column("driver_key", sa.Text(), nullable=True),
        sa.Column("sealed_credentials", sa.Text(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("orphan_after", sa.Double(), nullable=True),
        sa.Column("last_polled_at", sa.Double(), nullable=False),
        sa.Column("last_polled_clock", sa.JSON(), nullable=True),
        sa.Column("collected_at", sa.Double(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("results_digest", sa.String(length=64), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("error_is_permanent", sa.Boolean(), nullable=True),
        sa.Column("mlflow_run_id", sa.String(length=255), nullable=True),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("metrics_in_mlflow", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", "attempt"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_pool"), ["pool"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_state"), ["state"], unique=False)

    op.create_table(
        "job_metrics",
        sa.Column("job_id", sa.String(length=255), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("points", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "seq"),
    )
    op.create_table(
        "locks",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "pools",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column(
            "state", sa.Enum("up", "stopping", "down", name="poolstate", native_enum=False, length=20), nullable=False
        ),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("host_id", sa.String(length=255), nullable=True),
        sa.Column("min_nodes", sa.Integer(), nullable=False),
        sa.Column("max_nodes", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("next_node", sa.Integer(), nullable=False),
        sa.Column("owner", sa.JSON(), nullable=True),
        sa.Column("start_failures", sa.Integer(), nullable=False),
        sa.Column("last_failure", sa.String(), nullable=True),
        sa.Column("cooldown_until", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("touched_at", sa.Double(), nullable=False),
        sa.Column("quotas", sa.JSON(), nullable=True),
        sa.Column("clock", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "promotions",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
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
        sa.Column(
            "state",
            sa.Enum("intended", "confirmed", "withdrawn", name="promotionstate", native_enum=False, length=20),
            nullable=False,
        ),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("confirmed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("promotions", schema=None) as batch_op:
        batch_op.create_index("ix_promotions_alias", ["registry_uri", "model", "alias"], unique=False)

    op.create_table(
        "usage",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
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
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.create_index("ix_usage_job", ["job_id", "attempt"], unique=False)
        batch_op.create_index("ix_usage_lease", ["lease_id"], unique=False)
        batch_op.create_index("ix_usage_pool", ["pool", "ended_at"], unique=False)

    op.create_table(
        "demand",
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("operation_id", sa.String(length=255), nullable=True),
        sa.Column("set_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("pool"),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("ttl", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("renewed_clock", sa.JSON(), nullable=True),
        sa.Column("exclusive", sa.Boolean(), nullable=False),
        sa.Column("waiting", sa.Boolean(), nullable=False),
        sa.Column("queue_number", sa.Integer(), nullable=False),
        sa.Column("max_lifetime", sa.Double(), nullable=True),
        sa.Column("budget_node_hours", sa.Double(), nullable=True),
        sa.Column("team", sa.String(length=255), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_leases_pool"), ["pool"], unique=False)

    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("is_head", sa.Boolean(), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "planned",
                "starting",
                "ready",
                "draining",
                "failed",
                "ending",
                name="nodestate",
                native_enum=False,
                length=20,
            ),
            nullable=False,
        ),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("head_id", sa.String(length=255), nullable=True),
        sa.Column("operation_id", sa.String(length=255), nullable=True),
        sa.Column("cpus", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("supervisor", sa.JSON(), nullable=True),
        sa.Column("endpoint", sa.JSON(), nullable=True),
        sa.Column("busy", sa.Boolean(), nullable=False),
        sa.Column("spawned_at", sa.Double(), nullable=True),
        sa.Column("start_deadline", sa.Double(), nullable=False),
        sa.Column("drain_deadline", sa.Double(), nullable=True),
        sa.Column("leaving_at", sa.Double(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_nodes_pool"), ["pool"], unique=False)

    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column(
            "kind", sa.Enum("up", "scale", "lease", name="operationkind", native_enum=False, length=20), nullable=False
        ),
        sa.Column(
            "state",
            sa.Enum(
                "open", "succeeded", "rolled_back", "superseded", name="operationstate", native_enum=False, length=20
            ),
            nullable=False,
        ),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("block_until_min_cluster_size", sa.Integer(), nullable=True),
        sa.Column("replaced_size", sa.Integer(), nullable=True),
        sa.Column("replaced_operation_id", sa.String(length=255), nullable=True),
        sa.Column("lease_id", sa.String(length=255), nullable=True),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("node_errors", sa.JSON(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("operations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_operations_pool"), ["pool"], unique=False)
        batch_op.create_index(batch_op.f("ix_operations_state"), ["state"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("operations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_operations_state"))
        batch_op.drop_index(batch_op.f("ix_operations_pool"))

    op.drop_table("operations")
    with op.batch_alter_table("nodes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_nodes_pool"))

    op.drop_table("nodes")
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_leases_pool"))

    op.drop_table("leases")
    op.drop_table("demand")
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.drop_index("ix_usage_pool")
        batch_op.drop_index("ix_usage_lease")
        batch_op.drop_index("ix_usage_job")

    op.drop_table("usage")
    with op.batch_alter_table("promotions", schema=None) as batch_op:
        batch_op.drop_index("ix_promotions_alias")

    op.drop_table("promotions")
    op.drop_table("pools")
    op.drop_table("locks")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_state"))
        batch_op.drop_index(batch_op.f("ix_jobs_pool"))

    op.drop_table("jobs")
    op.drop_table("job_metrics")
    with op.batch_alter_table("history", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_history_pool"))
        batch_op.drop_index(batch_op.f("ix_history_operation_id"))

    op.drop_table("history")
    op.drop_table("files")
