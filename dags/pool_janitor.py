"""Remove every ten minutes what ended runs have left behind: nodes, leases and processes that no run needs any more.

Normally each run's own cleanup task does that. This DAG is for runs whose cleanup task did not run.
"""

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
    """Clean up all pools of this host in one task."""
    SweepPoolsOperator(task_id="sweep")


pool_janitor()
