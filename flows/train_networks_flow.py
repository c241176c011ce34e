"""Train two PyTorch networks every month, for digits and for flight delays, on nodes that are leased for the run.

``python flows/train_networks_flow.py`` serves the flow with a monthly schedule. Two workers train each network with
DDP. Each network is evaluated on rows that are not in its training data, and becomes the champion in MLflow if it is
better than the current champion. The network for delays is trained on the three complete months before the last
complete month, and evaluated on the last complete month. The images of digits have no date and are always the same. If
one network fails, the other network is still trained and reported; the run then ends as failed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from shoal.examples import delays, digits
from shoal.jobs import FunctionJobSpec, summary, summary_headline
from shoal.prefect import clean_up_run, distributed_train, pool_lease

POOL = "local://networks?max_nodes=4"
NODES = 2


@task(cache_policy=NO_CACHE)
def prepare_digits(epochs: int) -> FunctionJobSpec:
    """Write the Parquet files of the images if they do not exist, and return the spec of the training job."""
    return digits.training_spec(epochs)


@task(cache_policy=NO_CACHE)
def prepare_delays(month: int | None, scheduled: datetime) -> FunctionJobSpec:
    """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
    return delays.training_spec(month) if month else delays.scheduled_spec(scheduled)


@task(cache_policy=NO_CACHE)
def report(specs: list[Any], results: list[Any]) -> list[dict[str, Any]]:
    """Log one line per network: promoted, kept or failed, with the metric or the cause.

    Args:
        specs: The spec of each training, or the name of the network if the spec could not be made.
        results: The result of each training, or the exception with which the training or its preparation failed.

    Returns:
        The lines as dicts.

    Raises:
        RuntimeError: A training has failed.
    """
    lines = summary(specs, results)
    for line in lines:
        get_run_logger().info(str(line))
    if any(line.outcome == "failed" for line in lines):
        raise RuntimeError(summary_headline(lines))
    return [line.to_dict() for line in lines]


@flow(
    name="train-networks",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def train_networks(epochs: int = 15, month: int | None = None, pool: str = POOL) -> list[dict[str, Any]]:
    """Prepare both datasets, lease two nodes, train the networks one after the other, and release the nodes.

    Args:
        epochs: Number of epochs over the digits.
        month: Month of 2013 to evaluate the delays on, from 2 to 12; by default the last complete month before the run.
        pool: URI of the pool, or name of a pool that is up.

    Returns:
        One line per network, as dicts.
    """
    prepared = {
        "digits": prepare_digits(epochs, return_state=True),
        "delays": prepare_delays(month, flow_run.scheduled_start_time, return_state=True),
    }
    specs = {name: state.result() for name, state in prepared.items() if state.is_completed()}
    with pool_lease(NODES, pool_name=pool) as leased:
        # The leased nodes can run only one job at a time, so the other job waits in the pool's queue.
        trainings = {name: distributed_train.submit(spec, pool_name=leased.name) for name, spec in specs.items()}
    ended = {name: trainings.get(name, state) for name, state in prepared.items()}
    return report(
        [specs.get(name, name) for name in prepared], [one.result(raise_on_failure=False) for one in ended.values()]
    )


if __name__ == "__main__":
    # The flow runs on the first of the month at six. By default, Prefect pauses the schedule when this process stops.
    train_networks.serve(name="monthly", cron="0 6 1 * *", pause_on_shutdown=False)
