"""Train two networks with PyTorch, digits and flight delays, on a pool that grows for the duration.

``python flows/train_networks_flow.py`` runs it once. Each is trained by two workers with DDP, judged on rows that
it has not seen, and becomes the champion in MLflow if it is better than the one before.
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
    """Write the Parquet where it is not there yet, and say what to train on it."""
    return [digits.training_spec(epochs), delays.training_spec(month)]


@flow(
    name="train-networks",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def train_networks(epochs: int = 15, month: int = 12, pool: str = POOL) -> list[dict[str, Any]]:
    """Prepare both, grow to two nodes, train one after the other, shrink.

    Args:
        epochs: Over the digits.
        month: 2 to 12, the flights that judge.
        pool: URI of the pool, or the name of one that is up.

    Returns:
        The results of the jobs.
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
