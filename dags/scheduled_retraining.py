"""Retrain the flight delay model every month, on a pool whose nodes are leased for the run.

A run trains on the six complete months before the last complete month, and evaluates the model on the last complete
month. All these months have ended before the run's date. The model becomes the champion only if it is better on the
last month than the current champion. The sample data has the same flights every year. To run past months, use a
backfill::

    airflow backfill create --dag-id scheduled_retraining --max-active-runs 1 \\
        --from-date 2026-02-01 --to-date 2026-04-30

Backfill in the order of time, one run at a time. With ``--run-backwards`` the oldest model would become the champion,
because the sample data has no column of times (``time_col``).

If the months, the holdout and the settings are the same as for the newest version of the model, a run trains nothing,
and Airflow skips the task ``train`` and the tasks after ``train``.

With the parameter ``month``, a run always trains on the months of 2013 before this month, and evaluates the model on
this month. To train on a table of your own, copy this file, and change the paths, columns and names in `prepare`. The
pool is ``local://retrain?max_nodes=4``. To use another pool, write the pool's name or URI to the Airflow Variable
``shoal_retrain_pool``. If the pool's nodes are on other hosts, write a URI for the results, such as
``s3://bucket/jobs``, to the Variable ``shoal_retrain_artifacts``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import CronTriggerTimetable, Param, dag, get_current_context, task

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.sensors import NodesSensor

POOL = "{{ var.value.get('shoal_retrain_pool', 'local://retrain?max_nodes=4') }}"
ARTIFACTS = "{{ var.value.get('shoal_retrain_artifacts', '') }}"
NODES = 3
WINDOW_MONTHS = 6
FEATURES = (
    "month", "day", "weekday", "sched_dep_minute", "sched_arr_minute", "dep_delay", "distance",
    "carrier_code", "origin_code", "dest_code", "temp", "humid", "wind_speed", "precip", "pressure", "visib",
)  # fmt: skip
PARAMS = {"objective": "reg:squarederror", "eta": 0.1, "max_depth": 8, "subsample": 0.9, "eval_metric": "rmse"}

TIME_ZONE = "UTC"
"""Time zone of the schedule, in which the days and months of a run are counted. Airflow's dates are in UTC: at 03:00
in Tokyo, `logical_date` and `{{ ds }}` are still on the day before."""

MONTHLY = CronTriggerTimetable("@monthly", timezone=TIME_ZONE, run_immediately=timedelta(hours=1))
"""Schedule at the beginning of each month. The DAG has no start date, because with a start date in the past, unpausing
the DAG would start the last scheduled run at once. Without a start date, the first run is the next scheduled run, or
the last scheduled run if it is at most an hour late."""


@dag(
    schedule=MONTHLY,
    catchup=False,  # With catchup=True, unpausing the DAG would start a run for each past month.
    max_active_runs=2,  # Two runs may share the pool, because each has its own lease and jobs wait for free nodes.
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "month": Param(
            None,
            type=["null", "integer"],
            minimum=2,
            maximum=12,
            description="Month of 2013. Default: the last complete month before the run.",
        ),
        "rounds": Param(100, type="integer", minimum=1, description="Number of boosting rounds."),
    },
    tags=["shoal", "retraining"],
    doc_md=__doc__,
)
def scheduled_retraining() -> None:
    """Prepare the data, lease nodes, wait for them, train, release the nodes, and report the champion."""

    @task
    def prepare(artifacts: str = "") -> dict[str, Any]:
        """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
        from shoal.examples.flights import month_files, months_before, recent_files

        context = get_current_context()
        run, month, rounds = context["dag_run"], context["params"]["month"], context["params"]["rounds"]
        # Sample data. With a table of your own, the paths are for example ["s3://warehouse/flights/2026-10/"].
        if month:
            train, holdout, model = month_files(range(1, month)), month_files([month]), "flight-delays"
            period = f"until 2013-{month - 1:02}"
        else:
            # A run that was triggered by hand may have no logical date.
            moment = (run.logical_date or run.run_after).astimezone(ZoneInfo(TIME_ZONE))
            *window, last = months_before(moment, WINDOW_MONTHS + 1)
            # The model has another name than the model of 2013, because the two models must not be compared: the sample
            # data has the same flights in every year.
            train, holdout, model = recent_files(window), recent_files([last]), "recent-flight-delays"
            period = f"{window[0]} to {window[-1]}"
        return {
            "dataset": {"paths": train},
            "input_cols": list(FEATURES),
            "label_col": "arr_delay",
            "params": PARAMS,
            "n_estimators": rounds,
            "register": {"model": model, "metric": "rmse", "holdout": {"paths": holdout}},
            "tracking": {"experiment": model, "run_name": period},
            "run_config": {"artifact_location": artifacts or None},
        }

    @task
    def evaluate(result: dict[str, Any]) -> dict[str, Any]:
        """Print and return the metrics of the new model (challenger) and of the champion on the same month."""
        report = {
            "model": result["model_uri"],
            "version": result["model_version"],
            "challenger": {name: value for name, value in result["metrics"].items() if name.startswith("holdout-")},
            "champion": result["champion"],
            "promoted": result["promoted"],
        }
        for name, value in report.items():
            print(f"{name}: {value}")
        return report

    @task.branch
    def promoted_or_kept(report: dict[str, Any]) -> str:
        """Return the id of the task to run next, depending on whether the new model was promoted."""
        return "promoted" if report["promoted"] else "kept"

    spec = prepare(ARTIFACTS)
    with pool_for_run(size=NODES, pool_name=POOL, is_async=True) as pool:
        nodes = NodesSensor(task_id="wait_for_nodes", expected_nodes=NODES, pool_name=POOL)
        train = DistributedTrainOperator(
            task_id="train",
            spec=spec,
            skip_if_unchanged="{{ params.month is none }}",  # A run that a user has started for a month always trains.
            pool_name=POOL,
        )
        nodes >> train
    spec >> pool.setup
    report = evaluate(train.output)
    promoted_or_kept(report) >> [EmptyOperator(task_id="promoted"), EmptyOperator(task_id="kept")]


scheduled_retraining()
