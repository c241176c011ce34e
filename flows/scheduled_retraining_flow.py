"""Retrain the flight delay model every month, on a pool whose nodes are leased for the run.

``python flows/scheduled_retraining_flow.py`` serves the flow with a monthly schedule; `make run-prefect` runs the flow
once. A run trains on the six complete months before the last complete month, and evaluates the model on the last
complete month. If the months, the holdout and the settings are the same as for the newest version of the model, a run
trains nothing. With the parameter `month`, a run always trains on the months of 2013 before this month, and evaluates
the model on this month.

The pool is ``local://flights?max_nodes=4&libraries=xgboost,mlflow``. To use another pool, set
``SHOAL_RETRAIN_POOL`` to the pool's URI in the environment of the process that serves the flow. If the pool's nodes are
on other hosts, set ``SHOAL_RETRAIN_ARTIFACTS`` to a URI for the results, too. To train on a table of your own, copy
this file, and change the paths, columns and names in `spec_of_the_month`.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from shoal import RunConfig
from shoal.examples.flights import POOL, months_before, recent_files, retraining_spec
from shoal.jobs import JobSpec
from shoal.prefect import clean_up_run, distributed_train, pool_lease, wait_for_nodes

NODES = 3
WINDOW_MONTHS = 6


def spec_of_the_month(moment: datetime, rounds: int) -> JobSpec:
    """Return the spec of a job that trains on six complete months and evaluates the model on the complete month after
    them.

    Args:
        moment: Time for which the run is scheduled. No row of the month of `moment` or of a later month is used.
        rounds: Number of boosting rounds.
    """
    *window, last = months_before(moment, WINDOW_MONTHS + 1)
    return JobSpec.parse(
        {
            # Sample data. With a table of your own, the paths are for example ["s3://warehouse/flights/2026-10/"].
            "dataset": {"paths": recent_files(window)},
            "input_cols": [
                "month", "day", "weekday", "sched_dep_minute", "sched_arr_minute", "dep_delay", "distance",
                "carrier_code", "origin_code", "dest_code",
                "temp", "humid", "wind_speed", "precip", "pressure", "visib",
            ],
            "label_col": "arr_delay",
            "params": {
                "objective": "reg:squarederror", "eval_metric": "rmse", "eta": 0.1, "max_depth": 8, "subsample": 0.9,
            },
            "n_estimators": rounds,
            # The model has another name than the model of 2013, because the two models must not be compared: the sample
            # data has the same flights in every year.
            "register": {
                "model": "recent-flight-delays",
                "metric": "rmse",
                "holdout": {"paths": recent_files([last])},
            },
            "tracking": {"experiment": "recent-flight-delays", "run_name": f"{window[0]} to {window[-1]}"},
        }
    )  # fmt: skip


@task(cache_policy=NO_CACHE)
def prepare(month: int | None, scheduled: datetime, rounds: int) -> JobSpec:
    """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
    spec = retraining_spec(month, n_estimators=rounds) if month else spec_of_the_month(scheduled, rounds)
    run_config = RunConfig(artifact_location=os.environ.get("SHOAL_RETRAIN_ARTIFACTS"))
    return spec.model_copy(update={"run_config": run_config})


@task(cache_policy=NO_CACHE)
def report(result: dict[str, Any]) -> str:
    """Log and return the verdict of the training job: "promoted", "kept the champion" or "skipped".

    The verdict is "skipped" if no model was trained, because rows and settings are the same as for the newest version.
    """
    verdict = "skipped" if result["skipped"] else "promoted" if result["promoted"] else "kept the champion"
    get_run_logger().info("%s: version %s, %s", verdict, result["model_version"], result["metrics"])
    return verdict


@flow(
    name="scheduled-retraining",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def retrain(month: int | None = None, rounds: int = 100, pool: str = POOL) -> dict[str, Any]:
    """Prepare the data, lease three nodes, train, promote the new model if it is better, and release the nodes.

    Args:
        month: Month of 2013 to evaluate on, from 2 to 12; by default the last complete month before the run.
        rounds: Number of boosting rounds.
        pool: URI of the pool, or name of a pool that is up.

    Returns:
        The result of the job.
    """
    spec = prepare(month, flow_run.scheduled_start_time, rounds)
    with pool_lease(NODES, pool_name=pool) as leased:
        wait_for_nodes(NODES, pool_name=leased.name)
        # A run that a user has started for a month always trains, even without new rows.
        result = distributed_train(spec, skip_if_unchanged=month is None, pool_name=leased.name)
    report(result)
    return result


if __name__ == "__main__":
    pool = os.environ.get("SHOAL_RETRAIN_POOL", POOL)
    # The flow runs on the first of the month at six. By default, Prefect pauses the schedule when this process stops.
    retrain.serve(name="monthly", cron="0 6 1 * *", parameters={"pool": pool}, pause_on_shutdown=False)
