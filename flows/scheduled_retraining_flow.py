"""Retrain the flight delay model every month, on a pool that grows for the duration.

``python flows/scheduled_retraining_flow.py`` serves it on a cron; `make run-prefect` runs it once. Its parameter
`month` backfills: the months before it are learned, it is judged on `month`.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from shoal.examples.flights import POOL, retraining_spec
from shoal.jobs import JobSpec
from shoal.prefect import clean_up_run, distributed_train, pool_lease, wait_for_nodes

NODES = 3


@task(cache_policy=NO_CACHE)
def prepare(month: int, rounds: int) -> JobSpec:
    """Write the window's Parquet where it is not there yet, and say what to train on it."""
    return retraining_spec(month, n_estimators=rounds)


@task(cache_policy=NO_CACHE)
def report(result: dict[str, Any]) -> str:
    """Say what became of the challenger: the job has compared it to the champion on the month held out."""
    verdict = "promoted" if result["promoted"] else "kept the champion"
    get_run_logger().info("%s: version %s, %s", verdict, result["model_version"], result["metrics"])
    return verdict


@flow(
    name="scheduled-retraining",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def retrain(month: int | None = None, rounds: int = 100, pool: str = POOL) -> dict[str, Any]:
    """Prepare, grow to three nodes, train, evaluate champion and challenger, promote or keep, shrink.

    Args:
        month: 2 to 12, the month to be judged on; by default the one that the run is scheduled in.
        rounds: Rounds of boosting.
        pool: URI of the pool, or the name of one that is up.

    Returns:
        The result of the job.
    """
    # The flights are of one year: in January there is nothing before the month to learn from.
    spec = prepare(month or max(2, flow_run.scheduled_start_time.month), rounds)
    with pool_lease(NODES, pool_name=pool) as leased:
        wait_for_nodes(NODES, pool_name=leased.name)
        result = distributed_train(spec, pool_name=leased.name)
    report(result)
    return result


if __name__ == "__main__":
    # On the first of the month at six; stopping this process must not pause the schedule for good.
    retrain.serve(name="monthly", cron="0 6 1 * *", pause_on_shutdown=False)
