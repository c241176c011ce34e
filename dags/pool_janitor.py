"""Every ten minutes, remove leftovers that no cleanup task removed: nodes, leases and processes without an owner."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import dag

from shoal.airflow.operators import SweepPoolsOperator


@dag(
    schedule="*/10 * * * *",
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "ml-platform"},
    tags=["shoal", "janitor"],
    doc_md=__doc__,
)
def pool_janitor() -> None:
    """Sweep all pools of this host in one task."""
    SweepPoolsOperator(task_id="sweep")


pool_janitor()
