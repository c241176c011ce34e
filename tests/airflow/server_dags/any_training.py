"""A training with any spec, leased, waited for and given back; the failures are made with it."""

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
    params={"spec": Param({}, type="object")},
    tags=["tests"],
)
def any_training() -> None:
    @task
    def spec() -> dict[str, Any]:
        return get_current_context()["params"]["spec"]

    said = spec()
    with pool_for_run(size=2, pool_name=POOL) as pool:
        DistributedTrainOperator(task_id="train", spec=said, pool_name=POOL)
    said >> pool.setup


any_training()
