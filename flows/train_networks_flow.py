"""Train two PyTorch networks, for digits and for flight delays, on a pool whose nodes are leased for the run.

``python flows/train_networks_flow.py`` runs the flow once. Two workers train each network with DDP. Each network is
evaluated on rows that are not in its training data, and becomes the champion in MLflow if it is better than the current
champion.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from shoal.examples import delays, digits
from shoal.jobs import FunctionJobSpec
from shoal.prefect import clean_up_run, distributed_train, pool_lease

POOL = "local://networks?max_nodes=4"
NODES = 2


@task(cache_policy=NO_CACHE)
def prepare(epochs: int, month: int) -> list[FunctionJobSpec]:
    """Write the Parquet files if they do not exist, and return the specs of the two training jobs."""
    return [digits.training_spec(epochs), delays.training_spec(month)]


@flow(
    name="train-networks",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def train_networks(epochs: int = 15, month: int = 12, pool: str = POOL) -> list[dict[str, Any]]:
    """Prepare both datasets, lease two nodes, train the networks in sequence, and release the nodes.

    Args:
        epochs: Number of epochs over the digits.
        month: Month to evaluate the delays on, from 2 to 12.
        pool: URI of the pool, or name of a pool that is up.

    Returns:
        The results of the two jobs.
    """
    specs = prepare(epochs, month)
    with pool_lease(NODES, pool_name=pool) as leased:
        results = [distributed_train(spec, pool_name=leased.name) for spec in specs]
    for result in results:
        verdict = "promoted" if result["promoted"] else "kept the champion"
        get_run_logger().info(
            "%s: version %s, %s: %s", result["job_id"], result["model_version"], result["metrics"], verdict
        )
    return results


if __name__ == "__main__":
    train_networks()
