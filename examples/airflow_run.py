"""Run the flight retraining example as an Airflow DAG: ``python -m examples.airflow_run`` (`make run`).

The program starts an Airflow on loopback, triggers ``dags/scheduled_retraining.py`` for a month, and prints the
progress. At the end the program stops everything that it has started, even after an error. With ``--up`` (`make up`),
Airflow and its UI run until Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from examples.local_airflow import USER, LocalAirflow
from examples.python_run import (
    INTERRUPTED,
    Timeline,
    check_model_loads,
    command_line,
    console,
    run_alone,
    summary,
)
from shoal.errors import PoolDownError, PoolNotFoundError, ShoalError
from shoal.examples.flights import check_month
from shoal.jobs import JobResult
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.state.home import subfolder

DAGS = Path(__file__).parents[1] / "dags"
DAG_ID = "scheduled_retraining"
RUN_POOL = "local://airflow-run?max_nodes=4&libraries=xgboost,mlflow"
UP_POOL = "local://retrain?max_nodes=4&idle_timeout=1800"
"""URI of the pool for `make up`. The pool has an idle timeout, because `make up` cannot take the pool down if `make up`
itself is killed with SIGKILL. The pool then goes down by itself after 1,800 s without work."""

_LOOK_S = 0.5
_LOG_TAIL = 15


def run(month: int, rounds: int) -> JobResult:
    """Run the retraining DAG for one month, and print a summary.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12. Nothing was started.
        ShoalError: Airflow did not start, or the run failed. Everything has been stopped.
    """
    check_month(month)
    timeline = Timeline()
    pool = ComputePool(RUN_POOL)
    timeline.say("starting a pool and Airflow")
    try:
        with ThreadPoolExecutor(1) as threads:
            # This process is the pool's owner: if this process is killed, the pool goes down by itself. The jobs and
            # the lease of the DAG run end together with the pool.
            pool_up = threads.submit(pool.up, owner=ProcessId.mine())
            with _airflow(RUN_POOL) as airflow:
                pool_up.result()
                result = _run_dag(airflow, month, rounds, pool, timeline)
                timeline.say("stopping Airflow and taking the pool down")
    finally:
        with suppress(PoolNotFoundError):
            pool.down()
    _look(pool, timeline)
    check_model_loads(result)
    summary(timeline, month, result, "examples.airflow_run")
    console.print("      `make up` starts Airflow with its UI, `make run-prefect` runs the same with Prefect")
    return result


def _run_dag(airflow: LocalAirflow, month: int, rounds: int, pool: ComputePool, timeline: Timeline) -> JobResult:
    timeline.say(f"Airflow is ready; triggering {DAG_ID} for month {month}")
    run_id = airflow.trigger(DAG_ID, {"month": month, "rounds": rounds})
    state = _follow(airflow, run_id, pool, timeline)
    if state != "success":
        _explain(airflow, run_id)
        raise ShoalError(f"run {run_id} of {DAG_ID} ended in state {state}: see the log above for the cause")
    return JobResult.model_validate(airflow.returned(DAG_ID, run_id, "train"))


def up() -> None:
    """Run Airflow with its UI until Ctrl-C, and then take down the pool that the DAG trains on.

    Raises:
        ShoalError: Airflow did not start, or ended before Ctrl-C.
    """
    console.print("Starting Airflow …")
    try:
        with _airflow(UP_POOL) as airflow:
            _add_connection(airflow)
            airflow.call("PATCH", "/dags/pool_janitor", is_paused=False)
            airflow.call("PATCH", f"/dags/{DAG_ID}", is_paused=False)
            console.print(f"Airflow is up: {airflow.url}   user {USER}   password {airflow.password}", markup=False)
            console.print(f'In the UI, trigger {DAG_ID} with a month. Its pool is in the connection "retrain".')
            console.print("Ctrl-C stops Airflow and takes the pool down.")
            while airflow.alive():
                time.sleep(_LOOK_S)
            raise ShoalError(f"Airflow ended unexpectedly: see its log, {airflow.log}")
    finally:
        with suppress(PoolNotFoundError, PoolDownError):
            ComputePool(UP_POOL).down()


def _airflow(pool: str) -> LocalAirflow:
    if not DAGS.is_dir():
        raise ShoalError(f"{DAGS} does not exist: run this example from a clone of the repository")
    return LocalAirflow(subfolder("airflow"), [DAGS], {"AIRFLOW_VAR_SHOAL_RETRAIN_POOL": pool})


def _follow(airflow: LocalAirflow, run_id: str, pool: ComputePool, timeline: Timeline) -> str:
    """Print the states of tasks and nodes until the run has ended, and return the run's final state."""
    seen: dict[str, str | None] = {}
    while True:
        state = airflow.run_state(DAG_ID, run_id)
        for task_id, now in airflow.task_states(DAG_ID, run_id).items():
            if seen.get(task_id) != now and now not in (None, "scheduled", "queued"):
                timeline.say(f"task {task_id}: {now}")
            seen[task_id] = now
        _look(pool, timeline)
        if state in ("success", "failed"):
            return state
        time.sleep(_LOOK_S)


def _look(pool: ComputePool, timeline: Timeline) -> None:
    with suppress(PoolNotFoundError):
        timeline.update(pool.describe())


def _explain(airflow: LocalAirflow, run_id: str) -> None:
    """Print the last lines of the log of each task that has failed."""
    for task_id, state in airflow.task_states(DAG_ID, run_id).items():
        if state == "failed":
            console.print(f"[red]{task_id} failed[/]; the end of its log:")
            for attempt in (2, 1):
                with suppress(ShoalError):
                    lines = airflow.task_log(DAG_ID, run_id, task_id, attempt)
                    console.print("\n".join(lines[-_LOG_TAIL:]), markup=False, style="dim")
                    break


def _add_connection(airflow: LocalAirflow) -> None:
    host, _, options = UP_POOL.removeprefix("local://").partition("?")
    extra = "{" + ", ".join('"{}": "{}"'.format(*option.split("=")) for option in options.split("&")) + "}"
    with suppress(ShoalError):
        airflow.call("DELETE", "/connections/retrain")
    airflow.call(
        "POST",
        "/connections",
        connection_id="retrain",
        conn_type="compute_pool",
        host=host,
        schema="local",
        extra=extra,
        description="The pool of scheduled_retraining",
    )


def main() -> int:
    """Run the example, and return the exit code: 0 only if the run succeeded and the model can be loaded."""
    parser = command_line("Retrain the flight delay model with a real Airflow DAG.")
    parser.add_argument("--up", action="store_true", help="run Airflow with its UI until Ctrl-C")
    arguments = parser.parse_args()
    work = up if arguments.up else lambda: run(arguments.month, arguments.rounds)
    code = run_alone(work, farewell="Airflow is stopped and the pool is down", lock="airflow")
    return 0 if arguments.up and code == INTERRUPTED else code  # Ctrl-C is the normal end of `make up`, not an error.


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
