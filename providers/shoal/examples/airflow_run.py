"""The main job as a real Airflow DAG: ``python -m shoal.examples.airflow_run`` (what `make run` calls).

Starts an Airflow of its own, triggers ``dags/scheduled_retraining.py`` for a month, shows how far it is, and stops
everything, whatever happened on the way. ``--up`` (`make up`) leaves it running, with its UI, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shoal.errors import PoolDownError, PoolNotFoundError, ShoalError
from shoal.examples.flights import INTERRUPTED, Timeline, check_it_loads, console, run_alone, summary
from shoal.examples.local_airflow import USER, LocalAirflow
from shoal.jobs import JobResult
from shoal.pool.api import ComputePool
from shoal.state.home import subfolder
from shoal.state.process import ProcessId

DAGS = Path(__file__).parents[3] / "dags"
DAG_ID = "scheduled_retraining"
RUN_POOL = "local://airflow-run?max_nodes=4"
UP_POOL = "local://retrain?max_nodes=4&idle_timeout=1800"
"""Nothing takes this one down should `make up` be killed with SIGKILL: it goes by itself after half an hour."""

_LOOK_S = 0.5
_LOG_TAIL = 15


def run(month: int, rounds: int) -> JobResult:
    """Run the DAG for one month, with the summary.

    Raises:
        ShoalError: Airflow did not start, or the run failed; everything is stopped by then.
    """
    timeline = Timeline()
    # Embedded in this process: even if it is killed, the pool goes, and the run's jobs and lease with it.
    pool = ComputePool(RUN_POOL)
    timeline.say("a pool and Airflow come up")
    try:
        with ThreadPoolExecutor(1) as meanwhile:
            coming = meanwhile.submit(pool.up, owner=ProcessId.mine())
            with _airflow(RUN_POOL) as airflow:
                coming.result()
                result = _run_dag(airflow, month, rounds, pool, timeline)
                timeline.say("Airflow stops, the pool goes down")
    finally:
        with suppress(PoolNotFoundError):
            pool.down()
    _look(pool, timeline)
    check_it_loads(result)
    summary(timeline, month, result, "shoal.examples.airflow_run")
    console.print("           `make up` for the same with Airflow's UI, `make run-prefect` for Prefect")
    return result


def _run_dag(airflow: LocalAirflow, month: int, rounds: int, pool: ComputePool, timeline: Timeline) -> JobResult:
    timeline.say(f"Airflow is ready; month {month} of {DAG_ID} is triggered")
    run_id = airflow.trigger(DAG_ID, {"month": month, "rounds": rounds})
    state = _follow(airflow, run_id, pool, timeline)
    if state != "success":
        _explain(airflow, run_id)
        raise ShoalError(f"run {run_id} of {DAG_ID} ended as {state}")
    return JobResult.model_validate(airflow.returned(DAG_ID, run_id, "train"))


def up() -> None:
    """Keep Airflow up until Ctrl-C, with its UI and a pool to train on.

    Raises:
        ShoalError: It did not start, or ended.
    """
    console.print("Airflow comes up …")
    try:
        with _airflow(UP_POOL) as airflow:
            _add_connection(airflow)
            airflow.call("PATCH", "/dags/pool_janitor", is_paused=False)
            airflow.call("PATCH", f"/dags/{DAG_ID}", is_paused=False)
            console.print(f"Airflow is up: {airflow.url}   user {USER}   password {airflow.password}", markup=False)
            console.print(f'Trigger {DAG_ID} there with a month, or: make run. Connection "retrain" is its pool.')
            console.print("Ctrl-C ends Airflow and the pool.")
            while airflow.alive():
                time.sleep(_LOOK_S)
            raise ShoalError(f"Airflow ended; its log is {airflow.log}")
    finally:
        with suppress(PoolNotFoundError, PoolDownError):
            ComputePool(UP_POOL).down()


def _airflow(pool: str) -> LocalAirflow:
    if not DAGS.is_dir():
        raise ShoalError(f"{DAGS} is not there: this example runs from a clone of the repository")
    return LocalAirflow(subfolder("airflow"), [DAGS], {"AIRFLOW_VAR_SHOAL_RETRAIN_POOL": pool})


def _follow(airflow: LocalAirflow, run_id: str, pool: ComputePool, timeline: Timeline) -> str:
    """Show tasks and nodes until the run has ended; returns how."""
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
        timeline.look(pool.describe())


def _explain(airflow: LocalAirflow, run_id: str) -> None:
    """Show the end of the log of each task that failed."""
    for task_id, state in airflow.task_states(DAG_ID, run_id).items():
        if state == "failed":
            console.print(f"[red]{task_id} failed[/]; its log ends with")
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
    """Entry point; 0 only if the run succeeded and its model loads."""
    parser = argparse.ArgumentParser(description="Retrain the flight delay model with a real Airflow DAG.")
    parser.add_argument("--month", type=int, default=12, help="the month to judge on, 2 to 12; all before it learn")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of boosting")
    parser.add_argument("--up", action="store_true", help="start Airflow with its UI and leave it up until Ctrl-C")
    arguments = parser.parse_args()
    work = up if arguments.up else lambda: run(arguments.month, arguments.rounds)
    code = run_alone(work, farewell="Airflow is stopped and the pool is down", lock="airflow")
    return 0 if arguments.up and code == INTERRUPTED else code  # Ctrl-C is how `make up` ends


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
