"""Train two networks with PyTorch on a pool that is grown for it and given back: digits and flight delays.

Each is trained by two workers with DDP, judged on rows that it has not seen, registered in MLflow, and becomes the
champion if it is better than the one before. The pool is ``local://networks?max_nodes=4``, unless the Airflow Variable
``shoal_networks_pool`` names another one.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task

from shoal.airflow.context import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator

POOL = "{{ var.value.get('shoal_networks_pool', 'local://networks?max_nodes=4') }}"
NODES = 2


@dag(
    schedule=None,
    start_date=datetime(2013, 2, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "epochs": Param(15, type="integer", minimum=1, description="Over the digits."),
        "month": Param(12, type="integer", minimum=2, maximum=12, description="The flights that judge."),
    },
    tags=["shoal", "pytorch"],
    doc_md=__doc__,
)
def train_networks() -> None:
    """Prepare both, lease, train one after the other, give back, report."""

    @task
    def prepare_digits() -> dict[str, Any]:
        """Have the images as Parquet; return the training."""
        from shoal.examples.digits import training_spec

        return training_spec(get_current_context()["params"]["epochs"]).document()

    @task
    def prepare_delays() -> dict[str, Any]:
        """Have the months' Parquet files; return the training."""
        from shoal.examples.delays import training_spec

        return training_spec(get_current_context()["params"]["month"]).document()

    @task
    def report(results: list[dict[str, Any]]) -> None:
        """Which networks are champions now."""
        for result in results:
            verdict = "promoted" if result["promoted"] else "kept the champion"
            print(f"{result['job_id']}: version {result['model_version']}, {result['metrics']}: {verdict}")

    specs = [prepare_digits(), prepare_delays()]
    with pool_for_run(size=NODES, pool_name=POOL) as pool:
        digits = DistributedTrainOperator(task_id="train_digits", spec=specs[0], pool_name=POOL)
        delays = DistributedTrainOperator(task_id="train_delays", spec=specs[1], pool_name=POOL)
        digits >> delays  # the pool is for one at a time
    specs >> pool.setup
    report([digits.output, delays.output])


train_networks()
