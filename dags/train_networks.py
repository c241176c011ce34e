"""Train two PyTorch networks, for digits and for flight delays, on a pool whose nodes are leased for the run.

Two workers train each network with DDP. Each network is evaluated on rows that are not in its training data, registered
in MLflow, and becomes the champion if it is better than the current champion. The pool is
``local://networks?max_nodes=4``. To use another pool, write its name or URI to the Airflow Variable
``shoal_networks_pool``.
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
        "epochs": Param(15, type="integer", minimum=1, description="Number of epochs over the digits."),
        "month": Param(12, type="integer", minimum=2, maximum=12, description="Month to evaluate delays on."),
    },
    tags=["shoal", "pytorch"],
    doc_md=__doc__,
)
def train_networks() -> None:
    """Prepare both datasets, lease nodes, train the networks in sequence, release the nodes, and report."""

    @task
    def prepare_digits() -> dict[str, Any]:
        """Write the Parquet files of the images if they do not exist, and return the spec of the training job."""
        from shoal.examples.digits import training_spec

        return training_spec(get_current_context()["params"]["epochs"]).document()

    @task
    def prepare_delays() -> dict[str, Any]:
        """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
        from shoal.examples.delays import training_spec

        return training_spec(get_current_context()["params"]["month"]).document()

    @task
    def report(results: list[dict[str, Any]]) -> None:
        """Print for each network whether it became the champion."""
        for result in results:
            verdict = "promoted" if result["promoted"] else "kept the champion"
            print(f"{result['job_id']}: version {result['model_version']}, {result['metrics']}: {verdict}")

    specs = [prepare_digits(), prepare_delays()]
    with pool_for_run(size=NODES, pool_name=POOL) as pool:
        digits = DistributedTrainOperator(task_id="train_digits", spec=specs[0], pool_name=POOL)
        delays = DistributedTrainOperator(task_id="train_delays", spec=specs[1], pool_name=POOL)
        digits >> delays  # The jobs run in sequence, because the leased nodes have room for only one job at a time.
    specs >> pool.setup
    report([digits.output, delays.output])


train_networks()
