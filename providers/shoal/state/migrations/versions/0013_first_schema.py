"""Create the tables of shoal 0.1.0."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = None

_TYPES = {
    "string": sa.String(255),
    "state": sa.String(20),
    "digest": sa.String(64),
    "error": sa.String(),
    "text": sa.Text(),
    "json": sa.JSON(),
    "whole": sa.Integer(),
    "large": sa.BigInteger(),
    "real": sa.Double(),
    "flag": sa.Boolean(),
    "content": sa.LargeBinary(),
}


def _table(name: str, key: str, *more: sa.Constraint | sa.Column, **columns: str) -> None:
    """Create a table.

    Args:
        name: Name of the table.
        key: Columns of the primary key, separated by spaces.
        more: Columns with a default, and foreign keys.
        columns: Names of the columns of each type, separated by spaces. A column that may be NULL ends with "?".
    """
    found = [
        sa.Column(column.rstrip("?"), _TYPES[kind], nullable=column.endswith("?"))
        for kind, names in columns.items()
        for column in names.split()
    ]
    op.create_table(name, *found, *more, sa.PrimaryKeyConstraint(*key.split()))


def _index(name: str, table: str, *columns: str) -> None:
    op.create_index(name, table, list(columns))


def _of_pool() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["pool"], ["pools.name"], ondelete="CASCADE")


def _of_job(table: str, attempt: str, ondelete: str | None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["job_id", attempt],
        ["jobs.id", "jobs.attempt"],
        name=f"fk_{table}_jobs",
        ondelete=ondelete,
        deferrable=True,
        initially="DEFERRED",
    )


def upgrade() -> None:
    _table("airflow_deployments", "id base_url", string="id", text="base_url", real="seen_at")
    _table("files", "path", text="path", content="content", real="written_at")
    _table(
        "history",
        "id",
        whole="id",
        real="at",
        state="kind",
        text="actor subject detail? outcome",
        string="pool? operation_id?",
    )
    _index("ix_history_operation_id", "history", "operation_id")
    _index("ix_history_pool", "history", "pool")
    _table(
        "jobs",
        "id attempt",
        string="id pool mlflow_run_id? team?",
        whole="attempt priority metrics_in_mlflow task_try?",
        large="log_shown?",
        state="state",
        text="holder task_key? driver_key? sealed_credentials? label? task_run? task_name?",
        digest="results_digest? task_digest?",
        error="error?",
        json="spec endpoint driver? submitter gang queued_clock? last_polled_clock? result? progress? ancestors? versions?",
        flag="uses_gpu? needs_credentials error_is_permanent?",
        real="created_at queued_at? admitted_at? started_at? heartbeat_at? orphan_after? last_polled_at collected_at? ended_at? "
        "dismissed_at?",
    )
    _index("ix_jobs_pool", "jobs", "pool")
    _index("ix_jobs_state", "jobs", "state")
    _table("locks", "name", string="name", text="holder", real="expires_at")
    _table(
        "pools",
        "name",
        string="name host host_id?",
        state="state",
        whole="min_nodes max_nodes epoch next_node start_failures",
        json="spec owner? quotas? clock? decision?",
        error="last_failure?",
        real="created_at touched_at cooldown_until? seen_at?",
    )
    _table("demand", "pool", _of_pool(), string="pool operation_id?", whole="size", real="set_at")
    _table(
        "job_metrics",
        "job_id attempt seq",
        _of_job("job_metrics", "attempt", "CASCADE"),
        string="job_id",
        whole="attempt seq generation",
        text="points",
    )
    _table(
        "leases",
        "id",
        _of_pool(),
        string="id pool team?",
        text="holder",
        whole="size epoch queue_number",
        flag="exclusive waiting",
        json="renewed_clock? ancestors?",
        real="ttl created_at expires_at max_lifetime? budget_node_hours?",
    )
    _index("ix_leases_pool", "leases", "pool")
    _table(
        "nodes",
        "id",
        _of_pool(),
        string="id pool name head_id? operation_id?",
        state="state",
        whole="epoch cpus gpus",
        flag="is_head busy",
        json="supervisor? endpoint?",
        error="error?",
        real="created_at spawned_at? start_deadline drain_deadline? leaving_at?",
    )
    _index("ix_nodes_pool", "nodes", "pool")
    _table(
        "operations",
        "id",
        _of_pool(),
        string="id pool replaced_operation_id? lease_id?",
        state="kind state",
        text="holder",
        whole="size failures block_until_min_cluster_size? replaced_size?",
        json="node_errors",
        error="error?",
        real="created_at deadline ended_at?",
    )
    _index("ix_operations_pool", "operations", "pool")
    _index("ix_operations_state", "operations", "state")
    _table(
        "promotions",
        "id",
        _of_job("promotions", "attempt", None),
        whole="id attempt? withdrawn_after?",
        state="state",
        text="registry_uri model alias",
        string="version previous? metric holdout_digest job_id",
        json="version_identity? previous_identity?",
        real="value? created_at confirmed_at?",
    )
    _index("ix_promotions_alias", "promotions", "registry_uri", "model", "alias")
    _table("sizes", "id", _of_pool(), whole="id ready? target?", string="pool", real="at")
    _index("ix_sizes_pool", "sizes", "pool")
    _table(
        "study_logs",
        "job_id study number",
        sa.Column("first", sa.Integer(), nullable=False, server_default="1"),
        _of_job("study_logs", "first", "CASCADE"),
        string="job_id",
        whole="study number",
        text="entry",
    )
    _table(
        "usage",
        "id",
        sa.Column("first", sa.Integer(), nullable=True, server_default="1"),
        _of_job("usage", "first", "SET NULL"),
        whole="id nodes attempt?",
        string="pool lease_id? job_id? team?",
        text="holder end_reason?",
        json="begun_clock?",
        real="begun_at ended_at? node_seconds?",
    )
    _index("ix_usage_job", "usage", "job_id", "attempt")
    _index("ix_usage_lease", "usage", "lease_id")
    _index("ix_usage_pool", "usage", "pool", "ended_at")
