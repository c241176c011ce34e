"""Define the functions ``pool_janitor`` and ``retention``. Each function creates a DAG that cleans up regularly. Call
both functions in a file of your DAGs folder, such as ``dags/pool_janitor.py``.

Every ten minutes, ``pool_janitor`` removes nodes, leases and processes that no run needs any more. Normally each run's
own clean-up task removes these leftovers. ``pool_janitor`` is for runs whose clean-up task did not run.

Every night, ``retention`` deletes old versions of registered models to which no alias points, and jobs that ended long
ago.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import CronTriggerTimetable, Param, dag, get_current_context, task

from shoal.airflow.operators import SweepPoolsOperator
from shoal.airflow.results import no_retry_of_permanent_errors


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


@dag(
    # There is no start date. With a start date, Airflow would start a run as soon as a user unpauses the DAG, and this
    # run would delete versions and jobs.
    schedule=CronTriggerTimetable("@daily", timezone="UTC"),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "ml-platform", "retries": 1},
    params={
        "versions_older_than_days": Param(
            90, type="integer", minimum=1, description="Model versions of this age in days or more are deleted."
        ),
        "keep_last": Param(
            10, type="integer", minimum=0, description="Number of newest versions of each model that are kept."
        ),
        "jobs_older_than_days": Param(
            90, type="integer", minimum=1, description="Jobs that ended this many days ago or earlier are deleted."
        ),
        "tracking_uri": Param(
            None,
            type=["null", "string"],
            description="MLflow server or database. Default: MLFLOW_TRACKING_URI, or the database in $SHOAL_HOME.",
        ),
        "dry_run": Param(False, type="boolean", description="Delete nothing, only log what would be deleted."),
    },
    tags=["shoal", "janitor"],
    doc_md=__doc__,
)
def retention() -> None:
    """Delete old model versions and old jobs in one task."""

    @task
    def delete_old() -> list[str]:
        """Delete old model versions and old jobs; return and log the actions."""
        from shoal.jobs import retain

        params = get_current_context()["params"]
        with no_retry_of_permanent_errors():
            did = retain(
                versions_older_than=timedelta(days=params["versions_older_than_days"]),
                keep_last=params["keep_last"],
                jobs_older_than=timedelta(days=params["jobs_older_than_days"]),
                tracking_uri=params["tracking_uri"],
                dry_run=params["dry_run"],
            )
        print(*did, sep="\n")
        return did

    delete_old()
