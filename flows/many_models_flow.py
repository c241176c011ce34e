"""Retrain one model per carrier every night, on nodes that are leased for the run, and report one line per model.

``python flows/many_models_flow.py`` serves the flow with a nightly schedule. A run trains on the 90 days before the
last week, and evaluates the models on the last seven complete days. All these days have ended before the run's date.
Each model becomes the champion of its carrier only if it is better than the current champion. A training that fails
does not stop the other trainings; the run then ends as failed after all trainings.

To train on a table of your own, copy this file, and change the paths, columns and names in `spec_of_the_night`.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from shoal.examples.flights import daily_files
from shoal.jobs import for_each, summary, summary_headline, summary_table
from shoal.prefect import clean_up_run, distributed_train, pool_lease

POOL = "local://many-models?max_nodes=4"
NODES = 3

COLUMN = "carrier"
"""Column that divides the rows: one model is trained for each of its values."""


def spec_of_the_night(day: date, rounds: int) -> dict[str, Any]:
    """Return the spec of one night's run, with the rows of all carriers.

    Args:
        day: Date of the run. No row of this day or of a later day is used.
        rounds: Number of boosting rounds.
    """
    last_week = day - timedelta(days=7)
    begin = last_week - timedelta(days=90)
    paths = daily_files(begin, day)  # Sample data. With a table of your own: ["s3://warehouse/flights/"]
    return {
        "dataset": {"paths": paths, "filters": [["date", ">=", str(begin)], ["date", "<", str(last_week)]]},
        "input_cols": [
            "weekday",
            "sched_dep_minute",
            "sched_arr_minute",
            "dep_delay",
            "distance",
            "temp",
            "wind_speed",
        ],
        "label_col": "arr_delay",
        "params": {"objective": "reg:squarederror", "eta": 0.1, "max_depth": 6},
        "n_estimators": rounds,
        "scaling_config": {"num_workers": 1},  # One worker trains a model, so three nodes train three models at a time.
        "run_config": {"max_restarts": 1},
        "register": {
            "model": "arrival-delays-{carrier}",
            "metric": "rmse",
            "holdout": {"paths": paths, "filters": [["date", ">=", str(last_week)], ["date", "<", str(day)]]},
        },
        "tracking": {"experiment": "arrival-delays", "run_name": f"{{carrier}} until {last_week}"},
    }


@task(cache_policy=NO_CACHE)
def prepare(scheduled: datetime, rounds: int, min_rows: int) -> list[dict[str, Any]]:
    """Return one spec per carrier that has enough flights in the training window."""
    return for_each(spec_of_the_night(scheduled.date(), rounds), COLUMN, min_rows=min_rows)


@task(cache_policy=NO_CACHE)
def report(specs: list[dict[str, Any]], results: list[Any]) -> list[dict[str, Any]]:
    """Log one line per model: promoted, kept or failed, with the metric or the cause; also create a table artifact.

    Args:
        specs: The specs.
        results: The result of each training, or the exception with which it failed.

    Returns:
        The lines as dicts.

    Raises:
        RuntimeError: A training has failed.
    """
    lines = summary(specs, results)
    for line in lines:
        get_run_logger().info(str(line))
    create_table_artifact(key="many-models", table=summary_table(lines), description=summary_headline(lines))
    if any(line.outcome == "failed" for line in lines):
        raise RuntimeError(summary_headline(lines))
    return [line.to_dict() for line in lines]


@flow(
    name="many-models",
    on_failure=[clean_up_run],
    on_crashed=[clean_up_run],
    on_cancellation=[clean_up_run],
)
def retrain_many(rounds: int = 50, min_rows: int = 1000, pool: str = POOL) -> list[dict[str, Any]]:
    """Make a spec per carrier, lease three nodes, train the models, release the nodes, and report one line per model.

    Args:
        rounds: Number of boosting rounds.
        min_rows: Number of rows that a carrier needs in the 90 days to get a model.
        pool: URI of the pool, or name of a pool that is up.

    Returns:
        One line per model, as dicts.
    """
    specs = prepare(flow_run.scheduled_start_time, rounds, min_rows)
    with pool_lease(NODES, pool_name=pool) as leased:
        trainings = distributed_train.map(specs, pool_name=leased.name)
    return report(specs, trainings.result(raise_on_failure=False))


if __name__ == "__main__":
    # The flow runs at three o'clock. By default, Prefect pauses the schedule when this process stops.
    retrain_many.serve(name="nightly", cron="0 3 * * *", pause_on_shutdown=False)
