"""How tasks and runs end in a real Airflow: its processes are killed, tasks are marked and cleared, times run out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from examples.local_airflow import LocalAirflow
from shoal import ComputePool, jobs
from shoal.errors import ShoalError
from shoal.examples.flights import retraining_spec
from shoal.jobs import JobStatus
from shoal.state.schema import JobState
from tests.airflow.real_airflow import (
    JANITOR,
    POOL,
    airflow_until,
    component,
    ended,
    is_given_back,
    is_held_by,
    job_of,
    jobs_of,
    kill_all,
    process_of,
    real_airflow,
)
from tests.support.pool_processes import a_worker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

ANY = "any_training"
KINDS = ("waiting", "deferred")
EXECUTION_TIMEOUT_S = 60
"""`execution_timeout` of the DAGs `timed_*`."""


@pytest.fixture(scope="module")
def airflow(session_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    with real_airflow(tmp_path_factory.mktemp("airflow")) as airflow:
        yield airflow


Record = Callable[[str, object], None]
Start = Callable[[str], "Run"]


class Run:
    """A run of one of the DAGs in `server_dags/released_trainings.py`, the file by which it ends, and its record."""

    def __init__(self, airflow: LocalAirflow, dag_id: str, folder: Path) -> None:
        self.airflow, self.dag_id = airflow, dag_id
        self.release = folder / dag_id
        os.mkfifo(self.release)
        self.run_id = airflow.trigger(dag_id, {"release": str(self.release)})

    @property
    def job(self) -> JobStatus | None:
        return job_of(self.dag_id, self.run_id)

    @property
    def jobs(self) -> list[JobStatus]:
        return jobs_of(self.dag_id, self.run_id)

    @property
    def submissions(self) -> int:
        """How many tries have asked for the job."""
        return jobs.attach(self.job.job_id, self.job.attempt).submissions

    @property
    def starts(self) -> list[str]:
        """The record of the training function: a line per start."""
        record = self.release.with_name(f"{self.release.name}.record")
        return record.read_text().splitlines() if record.exists() else []

    @property
    def train(self) -> dict:
        return self.airflow.call("GET", f"/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/train")

    def log(self) -> list[str]:
        return self.airflow.task_log(self.dag_id, self.run_id, "train", self.train["try_number"])

    @property
    def deferred_at(self) -> float:
        path = f"/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/train/logs/1?full_content=true"
        entries = self.airflow.call("GET", path)["content"]
        (pause,) = [entry for entry in entries if "task as DEFERRED" in str(entry["event"])]
        return datetime.fromisoformat(pause["timestamp"]).timestamp()

    def wait_until_it_trains(self) -> None:
        """Wait until the training's log is in the log of the task's last try, and the task waits as its DAG says."""
        state = "deferred" if self.dag_id.endswith("deferred") else "running"
        airflow_until(
            lambda: self.train["state"] == state and any("second " in line for line in self.log()),
            f"a training in {self.dag_id}",
            300,
        )

    def end(self) -> str:
        return ended(self.airflow, self.dag_id, self.run_id)


@pytest.fixture
def start(airflow: LocalAirflow, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    """A function that starts a run of a DAG in `server_dags/released_trainings.py`; none goes on after the test."""
    runs = []

    def begin(dag_id: str) -> Run:
        runs.append(Run(airflow, dag_id, tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        path = f"/dags/{run.dag_id}/dagRuns/{run.run_id}"
        if airflow.call("GET", path)["state"] not in ("success", "failed"):
            airflow.call("PATCH", path, state="failed")


def worker_of(run: Run) -> psutil.Process:
    """The executor's worker that runs the training's task, as soon as it does: a task that will be deferred has its
    process for a few seconds only."""
    return process_of(run.airflow, run.dag_id, run.run_id, 300).parent()


def test_trainings_run_once_though_workers_triggerer_and_scheduler_are_killed(airflow: LocalAirflow, start: Start):
    waiting, deferred = (start(f"retried_{kind}") for kind in KINDS)
    worker = worker_of(deferred)
    wait_until(lambda: deferred.job, "the job of the task that is not yet deferred", 120)
    kill_all(worker)
    waiting.wait_until_it_trains()
    task = process_of(airflow, waiting.dag_id, waiting.run_id)
    task.parent().kill()
    wait_until(lambda: not task.is_running() or task.status() == psutil.STATUS_ZOMBIE, "the task without a worker", 60)
    airflow_until(lambda: waiting.submissions == 2, "the task's next try", 300)
    waiting.wait_until_it_trains()
    deferred.wait_until_it_trains()

    kill_all(component(airflow, "triggerer"))
    shown = len(deferred.log())
    airflow_until(lambda: len(deferred.log()) > shown + 1, "further lines of the deferred task", 300)

    kill_all(component(airflow, "scheduler"))
    airflow_until(lambda: waiting.submissions == 3, "the next try of the task of the killed scheduler", 300)

    for run in (waiting, deferred):
        run.release.write_text("now")
        assert run.end() == "success", airflow.task_states(run.dag_id, run.run_id)
        assert len(run.starts) == 1
    assert [(job.attempt, job.state) for job in waiting.jobs] == [(1, JobState.SUCCEEDED)]
    # The worker may have been killed before Ray had the job: then it never started, and the next try had another one.
    assert [job.state for job in deferred.jobs if job.started_at] == [JobState.SUCCEEDED]
    assert any("released" in line for line in deferred.log())
    seconds = [line.rpartition("second ")[2] for line in deferred.log() if "second " in line]
    assert set(seconds) == {str(number) for number in range(len(set(seconds)))}  # none is missing
    wait_until(is_given_back, "the pool as it was")


def wait_until_nothing_is_left(run: Run, since: float, record: Record) -> None:
    """Wait for the end of a run's job and lease, and for the pool as it was; record the seconds since `since`."""

    def has_ended() -> bool:
        return run.job.state in (JobState.CANCELLED, JobState.FAILED)

    def is_released() -> bool:
        held = [lease.holder for lease in ComputePool(POOL).describe().leases]
        return not any(is_held_by(holder, run.dag_id, run.run_id) for holder in held)

    for condition, what in ((has_ended, "job"), (is_released, "lease"), (is_given_back, "pool")):
        wait_until(condition, f"the {what} of {run.dag_id}", 300)
        record(f"{run.dag_id}: {what}", round(time.time() - since, 1))
    assert len(run.starts) == len(run.jobs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_marking_a_task_failed_ends_its_job(airflow: LocalAirflow, start: Start, kind: str, record: Record):
    run = start(f"single_{kind}")
    run.wait_until_it_trains()
    since = time.time()

    path = f"/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/train"
    airflow.call("PATCH", path, new_state="failed")

    wait_until_nothing_is_left(run, since, record)
    assert run.end() == "failed"


def test_a_killed_worker_without_a_retry_ends_the_job(airflow: LocalAirflow, start: Start, record: Record):
    run = start("single_waiting")
    run.wait_until_it_trains()
    since = time.time()

    kill_all(worker_of(run))

    wait_until_nothing_is_left(run, since, record)
    assert run.end() == "failed"


@pytest.mark.parametrize("kind", KINDS)
def test_execution_timeout_ends_the_job(airflow: LocalAirflow, start: Start, kind: str, record: Record):
    run = start(f"timed_{kind}")
    run.wait_until_it_trains()
    # A task that waits is timed from its start, a deferred one from its deferral.
    began = run.deferred_at if kind == "deferred" else datetime.fromisoformat(run.train["start_date"]).timestamp()

    wait_until_nothing_is_left(run, began + EXECUTION_TIMEOUT_S, record)
    assert run.end() == "failed"


def test_dagrun_timeout_ends_the_jobs_and_their_leases_without_a_teardown(
    airflow: LocalAirflow, start: Start, record: Record
):
    """Past its `dagrun_timeout` a run is failed and its tasks are ended, the teardown among them. The listener ends its
    job and its lease, and neither the listener nor the janitor those of others."""
    runs = [start(f"short_run_{kind}") for kind in KINDS]
    # Another Airflow has a run with the same ids.
    theirs = ComputePool(POOL, holder=f"airflow:theirs:{runs[0].dag_id}/{runs[0].run_id}")
    theirs.lease(1)
    deployment = airflow.call("GET", "/variables/shoal_deployment")["value"]
    ComputePool(POOL, holder=f"airflow:{deployment}:{ANY}/deleted").lease(1)
    for run in runs:
        run.wait_until_it_trains()
    for run in runs:
        assert run.end() == "failed"
    since = time.time()
    for run in runs:
        wait_until(lambda run=run: run.job.state is JobState.CANCELLED, f"the end of the job of {run.dag_id}", 120)
        record(f"{run.dag_id}: job", round(time.time() - since, 1))
        assert len(run.starts) == len(run.jobs) == 1

    wait_until(lambda: len(ComputePool(POOL).describe().leases) == 2, "the end of the runs' leases", 60)
    assert ended(airflow, JANITOR, airflow.trigger(JANITOR, {})) == "success"

    assert [lease.holder for lease in ComputePool(POOL).describe().leases] == [theirs.holder]
    theirs.release()
    wait_until(is_given_back, "the pool as it was")


def test_clearing_a_deferred_training_begins_anew_and_marking_its_run_failed_ends_its_job(
    airflow: LocalAirflow, start: Start
):
    run = start("single_deferred")
    run.wait_until_it_trains()
    # Without a newer trigger, SQLite gives the id of the cleared try's trigger to that of the next try. Airflow may
    # then hand over the old event before its executor has reported the deferral, and fail the task.
    newer = start("retried_deferred")
    newer.wait_until_it_trains()
    first = run.job
    only_train = {"dry_run": False, "task_ids": ["train"], "dag_run_id": run.run_id, "only_failed": False}

    airflow.call("POST", f"/dags/{run.dag_id}/clearTaskInstances", **only_train)

    airflow_until(lambda: len(run.starts) == 2, "the training of the next try", 300)
    run.wait_until_it_trains()
    states = {(job.job_id, job.attempt): job.state for job in run.jobs}
    assert sorted(state.value for state in states.values()) == ["cancelled", "running"]
    assert states[first.job_id, 1] is JobState.CANCELLED

    for ended_run in (run, newer):
        airflow.call("PATCH", f"/dags/{ended_run.dag_id}/dagRuns/{ended_run.run_id}", state="failed")

    wait_until(lambda: run.job.state is JobState.CANCELLED, "the job's end", 60)
    wait_until(is_given_back, "the pool as it was", 120)


def forever() -> dict:
    """A training that ends only when it is made to."""
    return retraining_spec(2, n_estimators=1_000_000).model_copy(update={"register_as": None}).document()


def trains(run_id: str) -> None:
    """Wait until the job of a run trains."""
    running: Callable[[], bool] = lambda: (job := job_of(ANY, run_id)) is not None and job.state is JobState.RUNNING  # noqa: E731
    wait_until(running, "the training", 120)


def test_a_killed_worker_fails_the_run_and_its_log_ends_with_the_cause(airflow: LocalAirflow):
    run = airflow.trigger(ANY, {"spec": forever()})
    trains(run)

    wait_until(a_worker, "a worker", 60).kill()

    assert ended(airflow, ANY, run) == "failed"
    assert airflow.task_states(ANY, run)["clean_up_pool"] == "success"
    log = airflow.task_log(ANY, run, "train")
    assert "was lost" in log[-1], log
    wait_until(is_given_back, "the pool as it was")


def test_marking_a_run_failed_ends_its_job(airflow: LocalAirflow):
    run = airflow.trigger(ANY, {"spec": forever()})
    trains(run)

    airflow.call("PATCH", f"/dags/{ANY}/dagRuns/{run}", state="failed")

    wait_until(lambda: job_of(ANY, run).state is JobState.CANCELLED, "the job's end", 60)
    airflow_until(lambda: airflow.task_states(ANY, run)["clean_up_pool"] == "success", "the teardown", 60)
    wait_until(is_given_back, "the pool as it was")


def test_a_killed_task_process_leaves_nothing(airflow: LocalAirflow):
    run = airflow.trigger(ANY, {"spec": forever()})
    trains(run)

    process_of(airflow, ANY, run).send_signal(signal.SIGKILL)

    assert ended(airflow, ANY, run) == "failed"
    assert airflow.task_states(ANY, run)["clean_up_pool"] == "success"
    assert job_of(ANY, run).state is JobState.CANCELLED
    wait_until(is_given_back, "the pool as it was")


def test_a_run_deleted_while_it_trains_ends_its_job(airflow: LocalAirflow):
    run = airflow.trigger(ANY, {"spec": forever()})
    trains(run)

    def deleted() -> bool:
        with suppress(ShoalError):  # refused while any of its tasks runs, the teardown too
            airflow.call("DELETE", f"/dags/{ANY}/dagRuns/{run}")
            return True
        return False

    assert not deleted()
    airflow.call("PATCH", f"/dags/{ANY}/dagRuns/{run}", state="failed")
    wait_until(deleted, "the deletion", 60)

    assert job_of(ANY, run).state is JobState.CANCELLED
    wait_until(is_given_back, "the pool as it was")
