"""Retrain one model per carrier every night, on nodes that are leased for the run, and report one line per model.

A run at night trains on the 90 days before the last week, and evaluates the models on the last seven complete days. All
these days have ended before the run's date. Each model becomes the champion of its carrier only if it is better than
the current champion. A training that fails does not stop the other trainings. The last task prints one line per model,
and fails if a training has failed.

To train on a table of your own, copy this file, and change the paths, columns and names in `spec_of_the_night`. The
pool is ``local://many-models?max_nodes=4``. To use another pool, write the pool's name or URI to the Airflow Variable
``shoal_many_models_pool``.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk import CronTriggerTimetable, Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import no_retry_of_permanent_errors, training_results

POOL = "{{ var.value.get('shoal_many_models_pool', 'local://many-models?max_nodes=4') }}"
NODES = 3

TIME_ZONE = "UTC"
"""Time zone of the schedule, in which the days and months of a run are counted. Airflow's dates are in UTC: at 03:00
in Tokyo, `logical_date` and `{{ ds }}` are still on the day before."""

NIGHTLY = CronTriggerTimetable("0 3 * * *", timezone=TIME_ZONE, run_immediately=timedelta(hours=1))
"""Schedule at three o'clock. The DAG has no start date, because with a start date in the past, unpausing the DAG would
start the last scheduled run at once. Without a start date, the first run is the next scheduled run, or the last
scheduled run if it is at most an hour late."""

COLUMN = "carrier"
"""Column that divides the rows: one model is trained for each of its values."""


def spec_of_the_night(day: date, rounds: int) -> dict[str, Any]:
    """Return the spec of one night's run, with the rows of all carriers.

    :param day: Date of the run. No row of this day or of a later day is used.
    :param rounds: Number of boosting rounds.
    """
    from shoal.examples.flights import daily_files

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


@dag(
    schedule=NIGHTLY,
    catchup=False,  # With catchup=True, unpausing the DAG would start a run for each past night.
    max_active_runs=1,
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "rounds": Param(50, type="integer", minimum=1, description="Number of boosting rounds."),
        "min_rows": Param(
            1000, type="integer", minimum=1, description="Rows that a carrier needs in the 90 days to get a model."
        ),
    },
    tags=["shoal", "retraining"],
    doc_md=__doc__,
)
def many_models() -> None:
    """Make a spec per carrier, lease nodes, train the models, release the nodes, and report one line per model."""

    @task
    def specs() -> list[dict[str, Any]]:
        """Return one spec per carrier that has enough flights in the training window."""
        from shoal.jobs import for_each

        context = get_current_context()
        run, params = context["dag_run"], context["params"]
        moment = run.logical_date or run.run_after  # A run that was triggered by hand may have no logical date.
        spec = spec_of_the_night(moment.astimezone(ZoneInfo(TIME_ZONE)).date(), params["rounds"])
        with no_retry_of_permanent_errors():
            return for_each(spec, COLUMN, min_rows=params["min_rows"])

    @task(trigger_rule="all_done", retries=0)
    def report(specs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Print and return one line per model: promoted, kept or failed, with the metric or the cause."""
        from shoal.jobs import summary, summary_headline

        if specs is None:
            raise AirflowFailException("there are no specs: see the log of the task specs")
        lines = summary(specs, training_results("train", mapped=len(specs)))
        for line in lines:
            print(line)
        print(summary_headline(lines))
        if any(line.outcome == "failed" for line in lines):
            raise AirflowFailException(summary_headline(lines))
        return [line.to_dict() for line in lines]

    per_carrier = specs()
    with pool_for_run(size=NODES, pool_name=POOL) as pool:
        # Each task instance that waits for free nodes is a process of Airflow. Six instances at a time are enough to
        # keep three nodes busy.
        train = DistributedTrainOperator.partial(
            task_id="train", pool_name=POOL, max_active_tis_per_dagrun=2 * NODES
        ).expand(spec=per_carrier)
    per_carrier >> pool.setup
    train >> report(per_carrier)


many_models()
