"""Trainings that end when they are told to, leased and given back; their tasks are ended in several ways.

Each is there twice: the task waits in a worker, or deferred in the triggerer.
"""

from __future__ import annotations

import os
import select
from datetime import UTC, datetime, timedelta

from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.sensors import NodesSensor

POOL = "{{ var.value.shoal_retrain_pool }}"


def until(release: str) -> str:
    """Run until something is written to a named pipe; each second is a line of the log, and each start a line of the
    record beside the pipe."""
    with open(f"{release}.record", "a") as record:
        record.write(f"process {os.getpid()}\n")
    pipe = os.open(release, os.O_RDONLY | os.O_NONBLOCK)
    seconds = 0
    while not select.select([pipe], [], [], 1)[0]:
        print(f"second {seconds}", flush=True)
        seconds += 1
    print("released", flush=True)
    return "released"


def define(
    dag_id: str,
    *,
    deferrable: bool,
    retries: int = 0,
    execution_timeout: timedelta | None = None,
    dagrun_timeout: timedelta | None = None,
) -> None:
    """Define a DAG."""

    @dag(
        dag_id=dag_id,
        schedule=None,
        start_date=datetime(2013, 1, 1, tzinfo=UTC),
        dagrun_timeout=dagrun_timeout,
        default_args={"owner": "tests"},
        params={"release": ""},
        tags=["tests"],
    )
    def training() -> None:
        with pool_for_run(size=2, pool_name=POOL, deferrable=deferrable):
            nodes = NodesSensor(task_id="nodes", expected_nodes=2, pool_name=POOL, deferrable=deferrable)
            train = DistributedTrainOperator(
                task_id="train",
                framework="pytorch",
                train_func=until,
                op_args=["{{ params.release }}"],
                # Each try renders another spec.
                spec={
                    "scaling_config": {"num_nodes": 1},
                    "tracking": None,
                    "hyper_params": {"try": "{{ ti.try_number }}", "now": "{{ macros.datetime.now() }}"},
                },
                pool_name=POOL,
                deferrable=deferrable,
                poll_interval=1,
                retries=retries,
                retry_delay=timedelta(seconds=1),
                execution_timeout=execution_timeout,
            )
            nodes >> train

    training()


for kind in ("waiting", "deferred"):
    deferred = kind == "deferred"
    define(f"retried_{kind}", deferrable=deferred, retries=4)
    define(f"single_{kind}", deferrable=deferred)
    define(f"timed_{kind}", deferrable=deferred, execution_timeout=timedelta(seconds=60))
    define(f"short_run_{kind}", deferrable=deferred, dagrun_timeout=timedelta(seconds=120))
