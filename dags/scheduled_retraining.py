"""Retrain the flight delay model every month, on a pool whose nodes are leased for the run.

The model is trained on the months before the run's month and evaluated on the run's month. It becomes the champion only
if it is better on this month than the current champion. The flights are of 2013, and so are the DAG's runs. Start them
with a backfill::

    airflow backfill create --dag-id scheduled_retraining --max-active-runs 1 \\
        --from-date 2013-02-01 --to-date 2013-04-30

or trigger a run with the month as a parameter. The pool is ``local://retrain?max_nodes=4``. To use another pool, write
its name or URI to the Airflow Variable ``shoal_retrain_pool``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import Param, dag, get_current_context, task

from shoal.airflow.context import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.sensors import NodesSensor

POOL = "{{ var.value.get('shoal_retrain_pool', 'local://retrain?max_nodes=4') }}"
NODES = 3


@dag(
    schedule="@monthly",
    start_date=datetime(2013, 2, 1, tzinfo=UTC),
    end_date=datetime(2013, 12, 31, tzinfo=UTC),
    catchup=False,  # Unpausing the DAG must not train eleven models. Use a backfill for past months.
    max_active_runs=2,  # Two runs can share the pool: each has its own lease, and jobs wait for free nodes.
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "month": Param(
            None, type=["null", "integer"], minimum=2, maximum=12, description="Default: the month of the run."
        ),
        "rounds": Param(100, type="integer", minimum=1, description="Number of boosting rounds."),
    },
    tags=["shoal", "retraining"],
    doc_md=__doc__,
)
def scheduled_retraining() -> None:
    """Prepare the data, lease nodes, wait for them, train, release the nodes, and report the champion."""

    @task
    def prepare() -> dict[str, Any]:
        """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
        from shoal.examples.flights import retraining_spec

        context = get_current_context()
        month = context["params"]["month"] or month_of(context["dag_run"].logical_date)
        return retraining_spec(month, n_estimators=context["params"]["rounds"]).document()

    @task
    def evaluate(result: dict[str, Any]) -> dict[str, Any]:
        """Print and return the metrics of champion and challenger on the same holdout."""
        report = {
            "model": result["model_uri"],
            "version": result["model_version"],
            "challenger": {name: value for name, value in result["metrics"].items() if name.startswith("holdout-")},
            "champion": result["champion"],
            "promoted": result["promoted"],
        }
        for name, value in report.items():
            print(f"{name}: {value}")
        return report

    @task.branch
    def promoted_or_kept(report: dict[str, Any]) -> str:
        """Return the id of the task to run next, depending on whether the new model was promoted."""
        return "promoted" if report["promoted"] else "kept"

    spec = prepare()
    with pool_for_run(size=NODES, pool_name=POOL, is_async=True) as pool:
        nodes = NodesSensor(task_id="wait_for_nodes", expected_nodes=NODES, pool_name=POOL)
        train = DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL)
        nodes >> train
    spec >> pool.setup
    report = evaluate(train.output)
    promoted_or_kept(report) >> [EmptyOperator(task_id="promoted"), EmptyOperator(task_id="kept")]


def month_of(logical_date: datetime | None) -> int:
    """Return the month of a run from its logical date, for a run without the parameter `month`."""
    if logical_date is None:
        raise ValueError('this run has no logical date: set the parameter "month", for example {"month": 12}')
    return logical_date.month


scheduled_retraining()
