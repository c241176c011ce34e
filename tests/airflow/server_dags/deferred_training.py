"""A deferred training that ends when it is told to, leased and given back; its task is killed in several ways."""

from __future__ import annotations

import os
import select
from datetime import UTC, datetime

from airflow.sdk import dag

from shoal.airflow.context import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.sensors import NodesSensor

POOL = "{{ var.value.shoal_retrain_pool }}"


def until(release: str) -> str:
    """Run until something is written to a named pipe; each second is a line of the log."""
    pipe = os.open(release, os.O_RDONLY | os.O_NONBLOCK)
    seconds = 0
    while not select.select([pipe], [], [], 1)[0]:
        print(f"second {seconds}", flush=True)
        seconds += 1
    print("released", flush=True)
    return "released"


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    default_args={"owner": "tests", "retries": 0},
    params={"release": ""},
    tags=["tests"],
)
def deferred_training() -> None:
    with pool_for_run(size=1, pool_name=POOL, deferrable=True):
        nodes = NodesSensor(task_id="nodes", expected_nodes=1, pool_name=POOL, deferrable=True)
        train = DistributedTrainOperator(
            task_id="train",
            framework="pytorch",
            train_func=until,
            op_args=["{{ params.release }}"],
            spec={"scaling_config": {"num_nodes": 1}, "tracking": None, "hyper_params": {"now": "{{ ti.try_number }}"}},
            pool_name=POOL,
            deferrable=True,
            poll_interval=1,
        )
        nodes >> train


deferred_training()
