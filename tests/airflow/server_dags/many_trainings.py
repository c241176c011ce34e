"""One training per value of a column, mapped over in one lease, and a summary of all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import training_results

POOL = "{{ var.value.shoal_retrain_pool }}"


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    default_args={"owner": "tests", "retries": 2, "retry_delay": timedelta(seconds=1)},
    params={"spec": Param({}, type="object"), "column": "kind"},
    tags=["tests"],
)
def many_trainings() -> None:
    @task
    def specs() -> list[dict[str, Any]]:
        from shoal.jobs import for_each

        params = get_current_context()["params"]
        return for_each(params["spec"], params["column"])

    @task(trigger_rule="all_done")
    def report(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from shoal.jobs import summary

        return [line.to_dict() for line in summary(specs, training_results("train", mapped=len(specs)))]

    said = specs()
    with pool_for_run(size=3, pool_name=POOL) as pool:
        train = DistributedTrainOperator.partial(task_id="train", pool_name=POOL, max_active_tis_per_dagrun=6).expand(
            spec=said
        )
    said >> pool.setup
    train >> report(said)


many_trainings()
