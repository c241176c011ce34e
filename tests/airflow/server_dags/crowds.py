"""As many deferred tasks as a run has: sensors that wait for nodes, and trainings that wait for room on the pool."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.sensors import NodesSensor

POOL = "{{ var.value.shoal_retrain_pool }}"
START = datetime(2013, 1, 1, tzinfo=UTC)


@dag(schedule=None, start_date=START, default_args={"owner": "tests"}, params={"sensors": 1}, tags=["tests"])
def crowd_of_sensors() -> None:
    @task
    def sizes() -> list[int]:
        return [3] * get_current_context()["params"]["sensors"]

    said = sizes()
    # The nodes are added to those of the trainings, and do not fit beside them: so the sensors wait.
    options = {"rollback_after_seconds": 7200}
    with pool_for_run(size=3, exclusive=True, is_async=True, options=options, pool_name=POOL) as pool:
        NodesSensor.partial(task_id="nodes", pool_name=POOL, deferrable=True).expand(expected_nodes=said)
    said >> pool.setup


@dag(
    schedule=None,
    start_date=START,
    default_args={"owner": "tests"},
    params={"specs": Param([], type="array")},
    tags=["tests"],
)
def crowd_of_trainings() -> None:
    @task
    def specs() -> list[dict[str, Any]]:
        return get_current_context()["params"]["specs"]

    said = specs()
    with pool_for_run(size=2, pool_name=POOL) as pool:
        DistributedTrainOperator.partial(task_id="train", pool_name=POOL, deferrable=True).expand(spec=said)
    said >> pool.setup


crowd_of_sensors()
crowd_of_trainings()
