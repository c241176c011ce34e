"""A training that never ends, in a run that has no time for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, get_current_context, task

from shoal.airflow.context import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator

POOL = "{{ var.value.shoal_retrain_pool }}"


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    dagrun_timeout=timedelta(seconds=20),
    default_args={"owner": "tests", "retries": 0},
    params={"spec": {}},
    tags=["tests"],
)
def timed_training() -> None:
    @task
    def spec() -> dict:
        return get_current_context()["params"]["spec"]

    said = spec()
    with pool_for_run(size=2, pool_name=POOL) as pool:
        DistributedTrainOperator(task_id="train", spec=said, pool_name=POOL)
    said >> pool.setup


timed_training()
