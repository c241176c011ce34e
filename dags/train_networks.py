"""Train two PyTorch networks every month, for digits and for flight delays, on nodes that are leased for the run.

Two workers train each network with DDP. Each network is evaluated on rows that are not in its training data, registered
in MLflow, and becomes the champion if it is better than the current champion. The network for delays is trained on the
three complete months before the last complete month, and evaluated on the last complete month. The images of digits
have no date and are always the same. If one network fails, the other network is still trained and reported.

The pool is ``local://networks?max_nodes=4``. To use another pool, write the pool's name or URI to the Airflow Variable
``shoal_networks_pool``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

from airflow.sdk import CronTriggerTimetable, Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import training_results

POOL = "{{ var.value.get('shoal_networks_pool', 'local://networks?max_nodes=4') }}"
NODES = 2

TIME_ZONE = "UTC"
"""Time zone of the schedule, in which the days and months of a run are counted. Airflow's dates are in UTC: at 03:00
in Tokyo, `logical_date` and `{{ ds }}` are still on the day before."""

MONTHLY = CronTriggerTimetable("@monthly", timezone=TIME_ZONE, run_immediately=timedelta(hours=1))
"""Schedule at the beginning of each month. The DAG has no start date, because with a start date in the past, unpausing
the DAG would start the last scheduled run at once."""


@dag(
    schedule=MONTHLY,
    catchup=False,  # With catchup=True, unpausing the DAG would start a run for each past month.
    max_active_runs=1,
    default_args={"owner": "ml-platform", "retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "epochs": Param(15, type="integer", minimum=1, description="Number of epochs over the digits."),
        "month": Param(
            None,
            type=["null", "integer"],
            minimum=2,
            maximum=12,
            description="Month of 2013 to evaluate delays on. Default: the last complete month before the run.",
        ),
    },
    tags=["shoal", "pytorch"],
    doc_md=__doc__,
)
def train_networks() -> None:
    """Prepare both datasets, lease nodes, train the networks one after the other, release the nodes, and report."""

    @task
    def prepare_digits() -> dict[str, Any]:
        """Write the Parquet files of the images if they do not exist, and return the spec of the training job."""
        from shoal.examples.digits import training_spec

        return training_spec(get_current_context()["params"]["epochs"]).document()

    @task
    def prepare_delays() -> dict[str, Any]:
        """Write the Parquet files of the months if they do not exist, and return the spec of the training job."""
        from shoal.examples.delays import scheduled_spec, training_spec

        context = get_current_context()
        run, month = context["dag_run"], context["params"]["month"]
        if month:
            return training_spec(month).document()
        # A run that was triggered by hand may have no logical date.
        moment = run.logical_date or run.run_after
        return scheduled_spec(moment.astimezone(ZoneInfo(TIME_ZONE))).document()

    @task(trigger_rule="all_done", retries=0)
    def report(digits: dict[str, Any] | None, delays: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Print and return one line per network: promoted, kept or failed, with the metric or the cause."""
        from shoal.jobs import summary, summary_headline

        # A spec is None if the task that prepares it has failed.
        lines = summary([digits or "digits", delays or "delays"], training_results("train_digits", "train_delays"))
        for line in lines:
            print(line)
        if any(line.outcome == "failed" for line in lines):
            raise AirflowFailException(summary_headline(lines))
        return [line.to_dict() for line in lines]

    digits, delays = prepare_digits(), prepare_delays()
    # The lease does not wait for the two tasks that prepare the data. Otherwise no nodes would be leased if one of
    # these tasks failed. The leased nodes can run only one job at a time, so the other job waits in the pool's queue.
    with pool_for_run(size=NODES, pool_name=POOL):
        trainings = [
            DistributedTrainOperator(task_id="train_digits", spec=digits, pool_name=POOL),
            DistributedTrainOperator(task_id="train_delays", spec=delays, pool_name=POOL),
        ]
    trainings >> report(digits, delays)


train_networks()
