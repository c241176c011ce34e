"""A training for each spec of a list, mapped over in one lease; the tasks of the lease have a prefix."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

POOL = "{{ var.value.shoal_retrain_pool }}"


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    default_args={"owner": "tests", "retries": 0},
    params={"specs": Param([], type="array")},
    tags=["tests"],
)
def mapped_training() -> None:
    @task
    def specs() -> list[dict[str, Any]]:
        return get_current_context()["params"]["specs"]

    @task(trigger_rule="all_done")
    def rows(results: list[dict[str, Any]]) -> list[int]:
        return [result["rows"] for result in results]

    with pool_for_run(size=2, pool_name=POOL, prefix="many", retries=1) as pool:
        said = specs()
        said >> pool.setup
        rows(DistributedTrainOperator.partial(task_id="train", pool_name=POOL).expand(spec=said).output)


mapped_training()
