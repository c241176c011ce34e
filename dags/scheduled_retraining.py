"""Retrain the flight delay model every month, on a pool that is grown for it and given back.

The months before the run's learn, the run's own judges: the new model becomes the champion only if it is better there
than the one before. The flights are of 2013, and so are the runs::

    airflow backfill create --dag-id scheduled_retraining --max-active-runs 1 \\
        --from-date 2013-02-01 --to-date 2013-04-30

or by hand, with the month as a parameter. The pool is ``local://retrain?max_nodes=4``, unless the Airflow Variable
``shoal_retrain_pool`` names another one.
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
    catchup=False,  # a backfill asks for the past; unpausing alone does not train eleven models
    max_active_runs=2,  # two months share the pool: each has its lease, and the trainings wait for free nodes
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "month": Param(None, type=["null", "integer"], minimum=2, maximum=12, description="By default the run's own."),
        "rounds": Param(100, type="integer", minimum=1, description="Rounds of boosting."),
    },
    tags=["shoal", "retraining"],
    doc_md=__doc__,
)
def scheduled_retraining() -> None:
    """Prepare, lease, wait for the nodes, train, give back; then see which model is the champion."""

    @task
    def prepare() -> dict[str, Any]:
        """Have the months' Parquet files; return the training as a job spec."""
        from shoal.examples.flights import retraining_spec

        context = get_current_context()
        month = context["params"]["month"] or month_of(context["dag_run"].logical_date)
        return retraining_spec(month, n_estimators=context["params"]["rounds"]).document()

    @task
    def evaluate(result: dict[str, Any]) -> dict[str, Any]:
        """Champion and challenger side by side, on rows that neither was trained on."""
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
        """Which way the champion's title went."""
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
    """The month that a run is for, where its parameters do not say."""
    if logical_date is None:
        raise ValueError('this run has no logical date: give it a month, {"month": 12}')
    return logical_date.month


scheduled_retraining()
