"""Predict the rows of the last complete month whenever a new version of the flight delay model becomes the champion.

The training of `scheduled_retraining` records an event when it promotes its model, and Airflow then starts this DAG. A
run predicts with the version that is the champion when the run begins, and looks again at its end: if another version
was promoted meanwhile, it triggers the next run. The predictions of each version are in a folder of their own.

To predict with another version, trigger the DAG with the parameter ``version``. The pool is
``local://retrain?max_nodes=4``. To use another pool, write the pool's name or URI to the Airflow Variable
``shoal_retrain_pool``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.operators import BatchPredictOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import model_asset

MODEL = "recent-flight-delays"
"""Name of the model that `scheduled_retraining` registers."""

POOL = "{{ var.value.get('shoal_retrain_pool', 'local://retrain?max_nodes=4') }}"
NODES = 2

TIME_ZONE = "UTC"
"""Time zone in which months are counted. Airflow's own dates are in UTC."""


def champion() -> str | None:
    """Return the version of the present champion; None if there is none."""
    from shoal.models import describe_model

    status = describe_model(MODEL).status
    return status.champion and status.champion.version


@dag(
    schedule=[model_asset(MODEL)],
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "version": Param(
            None,
            type=["null", "string"],
            description="Version of the model to predict with. Default: the champion.",
        ),
    },
    tags=["shoal", "scoring"],
    doc_md=__doc__,
)
def score_on_promotion() -> None:
    """Choose version, rows and output folder, lease nodes, predict, release the nodes, and look for a new champion."""

    @task(multiple_outputs=True)
    def choose() -> dict[str, Any]:
        """Return the model, the dataset and the output folder of the prediction."""
        from shoal.examples.flights import months_before, recent_files
        from shoal.state.home import subfolder

        context = get_current_context()
        version = context["params"]["version"] or champion()
        if version is None:
            raise AirflowFailException(
                f"{MODEL} has no champion: trigger the DAG with the parameter version, such as 3"
            )
        [month] = months_before(context["dag_run"].run_after.astimezone(ZoneInfo(TIME_ZONE)), 1)
        return {
            "model": f"models:/{MODEL}/{version}",
            "dataset": {"paths": recent_files([month])},  # With data of your own: ["s3://warehouse/flights/..."]
            "version": version,
            "output_path": str(subfolder("examples") / "predictions" / MODEL / f"version-{version}" / month),
        }

    @task.short_circuit
    def has_new_champion(version: str) -> bool:
        """Return whether another version was promoted while this run has predicted with the champion."""
        return get_current_context()["params"]["version"] is None and champion() not in (None, version)

    chosen = choose()
    with pool_for_run(size=NODES, pool_name=POOL) as pool:
        predicted = BatchPredictOperator(
            task_id="predict",
            model=chosen["model"],
            dataset=chosen["dataset"],
            output_path=chosen["output_path"],
            pool_name=POOL,
        )
    chosen >> pool.setup
    looked = has_new_champion(chosen["version"])
    predicted >> looked >> TriggerDagRunOperator(task_id="score_again", trigger_dag_id="score_on_promotion")


score_on_promotion()
