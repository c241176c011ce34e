"""A real Airflow on a real pool, shared by the tests of a module: its DAGs, how its parts are killed, how runs end."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from examples.airflow_run import DAG_ID, DAGS
from examples.local_airflow import LocalAirflow
from shoal import ComputePool, jobs
from shoal.jobs import JobStatus
from shoal.pool.holder import DagRunHolder
from tests.support.waiting import wait_until

POOL = "local://server-tests?max_nodes=4"
JANITOR = "pool_janitor"


@contextmanager
def real_airflow(
    home: Path, folders: Sequence[Path] = (), environment: Mapping[str, str] | None = None
) -> Iterator[LocalAirflow]:
    """Run Airflow with the sample DAGs and those of the tests, beside a pool that is up; nothing of both is left.

    Args:
        home: `$AIRFLOW_HOME`.
        folders: Further folders with DAG files.
        environment: Further settings of Airflow.
    """
    try:
        with LocalAirflow(
            home,
            [DAGS, Path(__file__).parent / "server_dags", *folders],
            {
                "AIRFLOW__SHOAL__DEPLOYMENT": "",  # the scheduler makes the Variable
                "AIRFLOW_VAR_SHOAL_RETRAIN_POOL": POOL,
                "AIRFLOW_VAR_SHOAL_NETWORKS_POOL": POOL,
                "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",  # tasks of a killed scheduler run again soon
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",  # so do tasks of a killed worker
                "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",  # so do triggers of a killed triggerer
                **(environment or {}),
            },
        ) as airflow:
            ComputePool(POOL).up()
            yield airflow
            session = airflow.session
    finally:
        ComputePool(POOL).down()
    assert [process for process in psutil.process_iter() if os.getsid(process.pid) == session] == []


def write_copy(folder: Path, dag_id: str, changes: Mapping[str, str]) -> None:
    """Write a copy of the sample DAG with another id, and with other changes of its text."""
    code = (DAGS / f"{DAG_ID}.py").read_text()
    for old, new in {f"{DAG_ID}()": f"{dag_id}()", **changes}.items():
        assert old in code, old
        code = code.replace(old, new)
    (folder / f"{dag_id}.py").write_text(code)


airflow_until = functools.partial(wait_until, every=1.0)
"""Waits for what Airflow's API shows: an answer takes its server 0.1 s of a CPU, which its tasks need for theirs."""


def ended(airflow: LocalAirflow, dag_id: str, run_id: str) -> str:
    airflow_until(lambda: airflow.run_state(dag_id, run_id) in ("success", "failed"), f"the end of {run_id}", 600)
    return airflow.run_state(dag_id, run_id)


def jobs_of(dag_id: str, run_id: str) -> list[JobStatus]:
    return [job for job in jobs.list_jobs(limit=1000) if is_held_by(job.holder, dag_id, run_id)]


def is_held_by(holder: str, dag_id: str, run_id: str) -> bool:
    run = DagRunHolder.of(holder)
    return run is not None and (run.dag_id, run.run_id) == (dag_id, run_id)


def job_of(dag_id: str, run_id: str) -> JobStatus | None:
    return next(iter(jobs_of(dag_id, run_id)), None)


def is_given_back() -> bool:
    status = ComputePool(POOL).describe()
    return status.leases == () and len(status.active) == status.target == 1


def process_of(airflow: LocalAirflow, dag_id: str, run: str, seconds: float = 30) -> psutil.Process:
    """The process of a run's training: a group of its own, with the id of the task instance as its title."""
    ti = airflow.call("GET", f"/dags/{dag_id}/dagRuns/{run}/taskInstances/train")["id"]

    def found() -> psutil.Process | None:
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == process.pid and ti in " ".join(process.cmdline()):
                    return process
        return None

    return wait_until(found, "the task's process", seconds)


def kill_all(process: psutil.Process) -> None:
    """SIGKILL a process with all that it runs, as the end of its container does."""
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()


def component(airflow: LocalAirflow, name: str) -> psutil.Process:
    """One of Airflow's components, which is started again when it is killed."""
    children = psutil.Process(airflow.session).children()
    [found] = [process for process in children if name in process.cmdline()]
    return found
