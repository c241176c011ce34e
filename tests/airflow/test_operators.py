from __future__ import annotations

import functools
import json
import math
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import httpx
import pandas as pd
import pytest
from airflow.sdk import DAG, task
from airflow.sdk.api.client import ServerResponseError
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRuntimeError,
    AirflowSkipException,
    AirflowTaskTimeout,
    ErrorType,
    TaskDeferred,
)
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.serialization.serialized_objects import DagSerialization

from shoal import history, jobs
from shoal.airflow.operators import (
    BatchPredictOperator,
    CleanupPoolOperator,
    DistributedTrainOperator,
    LeasePoolOperator,
    ManyModelsOperator,
    ScaleClusterOperator,
    SweepPoolsOperator,
    TuneOperator,
)
from shoal.airflow.operators.base import TaskKilledError, WorkerLostError
from shoal.airflow.operators.job_operator import LINKS
from shoal.airflow.pool_for_run import pool_for_run
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import (
    InvalidArgumentError,
    JobCancelledError,
    JobFailedError,
    NoTokenError,
    PoolDownError,
    ScaleError,
)
from shoal.jobs import JobHandle, JobResult
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.journal import commands
from shoal.pool.spec import LeaseOptions, PoolSpec
from shoal.state import Store, deployments
from shoal.state.schema import JobState, Lease, Pool, PoolState
from shoal.training.pytorch.request import launched, spread
from shoal.training.run_config import RunConfig
from tests.airflow.conftest import RUN
from tests.support.fake_ray_head import FakeHead
from tests.support.job_store import POOL
from tests.support.pool_processes import node_rows
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until

RESULT = {
    "model_path": __file__,
    "model_digest": "0" * 64,
    "model_uri": "models:/m/1",
    "metrics": {"eval-rmse": 1.5},
    "best_iteration": None,
    "rows": 10,
    "num_workers": 2,
    "seconds": 1.0,
    "restarts": 0,
    "peak_memory_per_worker": [1, 2],
    "mlflow_run_id": None,
    "model_version": None,
    "promoted": None,
    "champion": None,
}


def meanwhile(target, *args, **kwargs) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, kwargs=kwargs)
    thread.start()
    return thread


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def test_scale(up, context):
    assert ScaleClusterOperator(task_id="scale", expected_cluster_size=2, pool_name="tiny").execute(context)
    assert len(up.get_nodes()) == 2
    assert up.describe().last_operation.holder == RUN


def test_a_templated_size_is_a_text(up, context):
    ScaleClusterOperator(task_id="scale", expected_cluster_size="2", pool_name="tiny").execute(context)
    assert up.describe().target == 2


def test_a_scaling_that_fails_says_why_and_is_rolled_back(up, context, tiny):
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError, match="quota"):
        ScaleClusterOperator(task_id="scale", expected_cluster_size=3, pool_name="tiny").execute(context)
    assert up.describe().target == 1


def test_what_the_core_refuses_is_refused(up, context):
    with pytest.raises(AirflowFailException, match="MAX_NODES=4"):
        ScaleClusterOperator(task_id="scale", expected_cluster_size=9, pool_name="tiny").execute(context)
    lease = LeasePoolOperator(task_id="lease", size=2, pool_name="tiny", options="{{ params.options }}")
    lease.options = {"rollback_after": 1}
    with pytest.raises(AirflowFailException, match="did you mean rollback_after_seconds"):
        lease.execute(context)


def test_a_kill_takes_the_claim_back(up, context, monkeypatch):
    """Airflow calls `on_kill` in a signal handler of the task's main thread."""
    # Nodes that never come: it is killed before it has them.
    monkeypatch.setattr("tests.support.tiny_pools.ForkingTinyBackend.start", lambda self, pool, nodes: None)
    operator = LeasePoolOperator(task_id="lease", size=3, pool_name="tiny")
    killer = meanwhile(
        lambda: (wait_until(lambda: up.describe().leases, "the claim"), signal.raise_signal(signal.SIGUSR1))
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: operator.on_kill())
    try:
        with pytest.raises(TaskKilledError, match="Airflow has ended task"):
            operator.execute(context)
    finally:
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    assert up.describe().leases == ()
    assert up.describe().target == 1


def test_a_lease_brings_up_a_pool_that_it_can_define(tiny, context):
    lease = LeasePoolOperator(task_id="lease", size=2, pool_name="local://tiny?max_nodes=2")
    assert lease.execute(context) == "tiny"
    assert [(one.holder, one.size) for one in ComputePool("tiny").describe().leases] == [(RUN, 2)]
    assert len(ComputePool("tiny").get_nodes()) == 2


def test_a_changed_connection_defines_the_pool_anew_for_all_dags_and_a_uri_does_not(up, context, monkeypatch):
    up.down()
    uri = LeasePoolOperator(task_id="lease", size=1, pool_name="local://tiny?max_nodes=8")
    with pytest.raises(AirflowFailException, match="write the same URI"):
        uri.execute(context)
    monkeypatch.setenv("AIRFLOW_CONN_COMPUTE_POOL_DEFAULT", "compute-pool://tiny?max_nodes=8")
    LeasePoolOperator(task_id="lease", size=1).execute(context)
    assert up.describe().max_nodes == 8


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_all_tries_of_a_lease_have_the_size_that_the_first_has_planned(context, fresh_home, tmp_path):
    pd.DataFrame({"x": range(100), "y": range(100)}).to_parquet(tmp_path / "rows.parquet")
    spec = {"dataset": {"paths": [str(tmp_path)]}, "input_cols": ["x"], "label_col": "y"}
    spec["scaling_config"] = {"num_workers": 2, "num_cpu_per_worker": 1}
    uri = "local://planned?max_nodes=3&ray=false"
    lease = LeasePoolOperator(task_id="lease", size="auto", plan_for=spec, pool_name=uri, deferrable=True)
    try:
        with pytest.raises(TaskDeferred) as deferred:
            lease.execute(context)
        assert lease.execute_complete(context, {"timed_out": False}, **deferred.value.kwargs) == "planned"
        context["ti"].try_number = 2
        again = LeasePoolOperator(task_id="lease", size="auto", plan_for=spec, pool_name=uri, retries=1)
        context["ti"].max_tries = 1
        assert again.execute(context) == "planned"
        assert [(one.holder, one.size) for one in ComputePool("planned").describe().leases] == [(RUN, 2)]
        [plan] = jobs.list_jobs()
        assert (plan.holder, plan.state) == (RUN, JobState.SUCCEEDED)
    finally:
        ComputePool("planned").down()


def test_a_lease_leaves_a_pool_down_that_it_only_knows_by_name(up, context):
    up.down()
    with pytest.raises(PoolDownError):
        LeasePoolOperator(task_id="lease", size=2, pool_name="tiny").execute(context)


def test_a_lease_takes_a_pool_that_is_up_as_it_is(up, context):
    up.alter(max_nodes=3)
    LeasePoolOperator(task_id="lease", size=2, is_async=True, pool_name="local://tiny?max_nodes=4").execute(context)
    assert up.describe().target == 2


def test_an_exclusive_lease_waits_for_its_turn_and_logs_its_place(up, context, monkeypatch):
    other = ComputePool("tiny", holder="airflow:a_dag/other")
    other.lease(3, exclusive=True)
    lease = LeasePoolOperator(task_id="lease", size=2, exclusive=True, pool_name="tiny")
    logged: list[str] = []
    monkeypatch.setattr(lease.log, "info", logged.append)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(lease.execute, context)
        wait_until(lambda: logged, "its place in the log")
        other.release()
        assert waits.result(60) == "tiny"
    place = "the lease is waiting as the next in the queue, 3 of 4 nodes are taken"
    assert logged[0] == f"pool tiny: 3 of 3 nodes active; {place}"
    assert [(one.holder, one.exclusive) for one in up.describe().leases] == [(RUN, True)]


def test_cleanup_gives_back_what_the_run_has_and_no_more(up, context):
    LeasePoolOperator(task_id="lease", size=2, pool_name="tiny").execute(context)
    other = ComputePool("tiny", holder="airflow:a_dag/other", team="fraud")
    other.lease(2)
    clean = CleanupPoolOperator(task_id="clean", pool_name="tiny")
    assert clean.execute(context)["released"] is True
    assert clean.execute(context)["released"] is False
    assert [one.holder for one in up.describe().leases] == ["airflow:a_dag/other"]

    def clean_other(owner: str) -> None:
        CleanupPoolOperator(task_id="clean", pool_name="tiny", holder="airflow:a_dag/other", owner=owner).execute(
            context
        )

    with pytest.raises(
        AirflowFailException, match='the lease of airflow:a_dag/other on pool "tiny" belongs to team "fraud"'
    ):
        clean_other("ads")
    assert [one.holder for one in up.describe().leases] == ["airflow:a_dag/other"]
    clean_other("fraud")
    wait_until(lambda: jobs.sweep() is not None and len(node_rows()) == 1, "the head alone")


def test_a_cleanup_counts_what_it_does_for_others_and_the_janitor_names_them(up, context, capsys):
    own, others = f"{RUN}#score_lease_pool", ["airflow:staging:a_dag/a_run", "airflow:staging:a_dag/b_run"]
    elsewhere = {holder: ComputePool("local://other?max_nodes=4", holder=holder) for holder in (own, *others)}
    elsewhere[own].up()

    def expire(*holders: str) -> None:
        for holder in holders:
            elsewhere[holder].lease(1)
        with Store().transaction() as session:
            session.query(Lease).update({"expires_at": 0.0, "renewed_clock": None})

    expire(own, others[0])
    report = CleanupPoolOperator(task_id="clean", pool_name="tiny").execute(context)
    counted = re.compile(r"other actions on this host: [1-9]\d* \(see shoal history\)")
    assert report["swept"][0] == f"other: the lease of {own} expired"
    assert [line for line in report["swept"] if counted.fullmatch(line)] == [report["swept"][-1]]
    said = capsys.readouterr().out
    assert all(each in said for each in report["swept"])
    assert "staging" not in said + str(report)
    assert f"other: the lease of {others[0]} expired" in str([each.detail for each in history.read(kind="swept")])

    expire(others[1])
    assert f"other: the lease of {others[1]} expired" in SweepPoolsOperator(task_id="sweep").execute(context)


def test_sweep_clears_what_is_left_of_a_dead_node(up, context):
    (node,) = node_rows()
    ProcessId.from_json(node.supervisor).signal(signal.SIGKILL)
    did = wait_until(lambda: SweepPoolsOperator(task_id="sweep").execute(context), "the leftovers")
    assert any(f"ended {node.name}" in line for line in did)


def test_the_janitor_cleans_up_after_runs_that_are_over_and_no_others(up, context):
    states = {"over/2024-01-01T00:00:00": "failed", "goes_on": "running"}

    def get_dagrun_state(dag_id, run_id):
        assert dag_id == "a_dag"
        if run_id == "deleted, in dag.test()":
            answer = httpx.Response(404, json={"detail": {"reason": "not_found"}})
            raise ServerResponseError("not found", request=httpx.Request("GET", "http://airflow"), response=answer)
        if run_id not in states:
            not_found = {"detail": {"reason": "not_found"}} if run_id == "deleted" else None
            detail = {"status_code": 404, "detail": not_found}
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail=detail))
        return states[run_id]

    context["ti"].get_dagrun_state = get_dagrun_state
    holders = [
        "airflow:a_dag/over/2024-01-01T00:00:00",
        "airflow:tests:a_dag/deleted",
        "airflow:tests:a_dag/deleted, in dag.test()",
        "airflow:tests:a_dag/over/2024-01-01T00:00:00",
        "airflow:tests:a_dag/over/2024-01-01T00:00:00#score_lease_pool",
        "airflow:tests:a_dag/goes_on",
        "airflow:tests:a_dag/goes_on#score_lease_pool",
        "airflow:tests:a_dag/a proxy says 404",
        "airflow:others:a_dag/over/2024-01-01T00:00:00",
        "airflow:others:a_dag/deleted",
        "airflow:a_dag/deleted",
        "airflow:by_hand",
        "prefect:over",
    ]
    over, deleted = "its DAG run ended as failed", "its DAG run was deleted"
    reasons = [over, deleted, deleted, over, over]
    for holder in holders:
        ComputePool("tiny", holder=holder).lease(1)
    did = SweepPoolsOperator(task_id="sweep").execute(context)
    assert did == [
        f"tiny: released the lease of {holder}: {why}" for holder, why in zip(holders, reasons, strict=False)
    ]
    assert [lease.holder for lease in up.describe().leases] == holders[5:]


def test_the_janitor_leaves_deleted_runs_while_a_copy_of_its_airflow_runs(up, context, monkeypatch):
    def get_dagrun_state(dag_id, run_id):
        detail = {"status_code": 404, "detail": {"detail": {"reason": "not_found"}}}
        raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail=detail))

    context["ti"].get_dagrun_state = get_dagrun_state
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example")
    deployments.record(Store(), "tests", "https://copy.example", time.time())
    run = ComputePool("tiny", holder="airflow:tests:a_dag/run_of_the_copy")
    run.lease(1)

    assert SweepPoolsOperator(task_id="sweep").execute(context) == []
    assert [lease.holder for lease in up.describe().leases] == [run.holder]


def test_two_leases_of_a_run_are_cleaned_up_one_by_one(up, context):
    """The two blocks of a DAG on one pool, as `pool_for_run` makes them."""
    for lease, size in (("lease_pool", 2), ("score_lease_pool", 3)):
        LeasePoolOperator(task_id="lease", size=size, pool_name="tiny", lease=lease).execute(context)
    CleanupPoolOperator(task_id="clean", pool_name="tiny", lease="lease_pool").execute(context)
    assert [(lease.holder, lease.size) for lease in up.describe().leases] == [(f"{RUN}#score_lease_pool", 3)]
    CleanupPoolOperator(task_id="clean", pool_name="tiny", lease="score_lease_pool").execute(context)
    assert up.describe().leases == ()


@pytest.fixture
def on_fake_head(store, head, monkeypatch):
    """Jobs go to a head that is an HTTP server; what would be their drivers' doing, the test does."""
    where = lambda name: head.endpoint  # noqa: E731
    monkeypatch.setattr("shoal.jobs.submit", functools.partial(jobs.submit, endpoint_of=where))
    return head


def ended(state: JobState, **how) -> None:
    """The driver's doing, as soon as the job is there."""
    (job,) = wait_until(lambda: jobs.list_jobs(states=(JobState.PENDING,)), "the job")
    result = {"job_id": job.job_id, "attempt": job.attempt, **RESULT} if state is JobState.SUCCEEDED else None
    wait_until(lambda: attempts.start(Store(), Key(job.job_id, job.attempt), {}, 1.0), "the start")
    attempts.end(Store(), Key(job.job_id, job.attempt), state, 2.0, result=result, **how)


def row(handle):
    return attempts.load(Store(), Key(handle.job_id, handle.attempt))


def train(spec, **kwargs) -> DistributedTrainOperator:
    return DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL, **kwargs)


def test_training_returns_its_result_as_plain_data(on_fake_head, spec, context):
    driver = meanwhile(ended, JobState.SUCCEEDED)
    result = train(spec.document()).execute(context)
    driver.join()
    assert JobResult.model_validate(result).metrics == {"eval-rmse": 1.5}
    (job,) = jobs.list_jobs()
    assert (job.holder, job.pool) == (RUN, POOL)


REGISTER = {"model": "m", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}


@pytest.mark.parametrize("wanted", [None, True, "{{ dag_run.run_id == 'a_run' }}"])
def test_a_training_without_new_rows_is_a_skipped_task(on_fake_head, spec, context, monkeypatch, wanted):
    reason = "rows, holdout and settings are those of m version 3"
    monkeypatch.setitem(RESULT, "skipped", reason)
    driver = meanwhile(ended, JobState.SUCCEEDED)
    task = train({**spec.document(), "register": REGISTER}, skip_if_unchanged=wanted)
    task.render_template_fields(context)

    with pytest.raises(AirflowSkipException, match=reason):
        task.execute(context)

    driver.join()
    (job,) = jobs.list_jobs()
    assert row(jobs.attach(job.job_id)).spec["register"]["skip_if_unchanged"] is True


def test_a_task_that_is_told_to_train_is_not_skipped(on_fake_head, spec, context):
    driver = meanwhile(ended, JobState.SUCCEEDED)
    task = train({**spec.document(), "register": REGISTER}, skip_if_unchanged="{{ dag_run.run_id != 'a_run' }}")
    task.render_template_fields(context)
    task.execute(context)
    driver.join()
    (job,) = jobs.list_jobs()
    assert row(jobs.attach(job.job_id)).spec["register"]["skip_if_unchanged"] is False


def test_a_retry_of_a_task_finds_its_job_though_it_may_be_skipped(on_fake_head, spec, context):
    """The job of the first try came from a version whose tasks did not say whether it may be skipped."""
    registered = {**spec.document(), "register": REGISTER}
    submitted = jobs.submit(jobs.parse_spec(registered).on_pool(POOL), holder=RUN, key="train/-1")
    driver = meanwhile(ended, JobState.SUCCEEDED)
    result = train(registered).execute(context)
    driver.join()
    assert (result["job_id"], result["attempt"]) == (submitted.job_id, 1)
    assert len(jobs.list_jobs()) == 1


def test_a_metric_that_is_not_finite_fits_into_an_xcom(on_fake_head, spec, context, monkeypatch):
    """Airflow posts it as strict JSON, and a NaN would fail the task of a job that has succeeded."""
    monkeypatch.setitem(RESULT, "metrics", {"eval-auc": float("nan"), "eval-loss": float("inf")})
    driver = meanwhile(ended, JobState.SUCCEEDED)
    result = train(spec).execute(context)
    driver.join()
    posted = json.dumps(result, allow_nan=False)
    metrics = JobResult.model_validate_json(posted).metrics
    assert math.isnan(metrics["eval-auc"]) and metrics["eval-loss"] == float("inf")


@pytest.mark.parametrize(
    ("state", "is_permanent", "expected"),
    [
        (JobState.FAILED, None, JobFailedError),
        (JobState.FAILED, False, JobFailedError),
        (JobState.FAILED, True, AirflowFailException),
        (JobState.CANCELLED, False, JobCancelledError),
        (JobState.CANCELLED, True, AirflowFailException),
    ],
)
def test_a_failure_ends_with_its_cause(on_fake_head, spec, context, state, is_permanent, expected):
    driver = meanwhile(ended, state, error='column "a" is not there', error_is_permanent=is_permanent)
    with pytest.raises(expected, match=r'column "a" is not there$'):
        train(spec).execute(context)
    driver.join()


def test_a_further_try_attaches_and_after_a_failure_makes_a_new_attempt(on_fake_head, spec, context, monkeypatch):
    on_pool = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"pool_name": POOL})})
    first = jobs.submit(on_pool, holder=RUN, key="train/-1")
    is_waited_for = threading.Event()
    wait = JobHandle.wait
    monkeypatch.setattr(JobHandle, "wait", lambda *args, **kwargs: (is_waited_for.set(), wait(*args, **kwargs))[1])

    def fails_once_it_is_waited_for() -> None:
        wait_until(is_waited_for.is_set, "the further try")
        ended(JobState.FAILED, error="lost")

    driver = meanwhile(fails_once_it_is_waited_for)
    with pytest.raises(JobFailedError, match=rf"{first.job_id}.*attempt 1.*lost"):
        train(spec).execute(context)
    driver.join()
    driver = meanwhile(ended, JobState.SUCCEEDED)
    assert train(spec).execute(context)["attempt"] == 2
    driver.join()


def test_mapped_trainings_are_jobs_of_their_own_and_a_retry_finds_its_own(on_fake_head, spec, context):
    def execute(index: int, state: JobState) -> dict:
        driver = meanwhile(ended, state)
        try:
            ti = SimpleNamespace(task_id="train", map_index=index, try_number=1, max_tries=0)
            return train(spec).execute({**context, "ti": ti})
        finally:
            driver.join()

    ids = [execute(index, JobState.SUCCEEDED)["job_id"] for index in (0, 1, 3)]
    with pytest.raises(JobFailedError):
        execute(2, JobState.FAILED)
    retried = execute(2, JobState.SUCCEEDED)
    assert retried["attempt"] == 2
    assert len({*ids, retried["job_id"]}) == 4
    assert len(jobs.list_jobs()) == 5


def running(head: FakeHead) -> None:
    """Be the driver: it runs only where the head has been sent the job."""
    wait_until(lambda: head.jobs, "the job on the head")
    (job,) = wait_until(lambda: jobs.list_jobs(states=(JobState.PENDING,)), "the job")
    wait_until(lambda: attempts.start(Store(), Key(job.job_id, job.attempt), {}, 1.0), "the start")


def test_a_killed_task_takes_its_job_with_it(on_fake_head, spec, context):
    operator = train(spec)
    killer = meanwhile(lambda: (running(on_fake_head), operator.on_kill()))
    with pytest.raises(TaskKilledError, match="Airflow has ended task"):
        operator.execute(context)
    killer.join()
    (job,) = jobs.list_jobs()
    assert job.state is JobState.CANCELLED
    assert on_fake_head.stops


def test_a_task_whose_worker_was_killed_leaves_the_job_and_its_result_to_the_next_try(
    on_fake_head, spec, context, monkeypatch
):
    supervisor, connection = socket.socketpair()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", SimpleNamespace(socket=connection), raising=False)
    with connection:
        killer = meanwhile(lambda: (running(on_fake_head), supervisor.close()))
        with pytest.raises(WorkerLostError, match="next try of the task attaches"):
            train(spec).execute(context)
        killer.join()
    (job,) = jobs.list_jobs()
    assert job.state is JobState.RUNNING
    assert not on_fake_head.stops


def test_a_try_that_is_killed_late_leaves_the_job_to_the_newer_try(on_fake_head, spec, context, monkeypatch):
    """Airflow starts a new try if it had lost the scheduler or the worker for some time, and then kills the old one."""
    on_pool = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"pool_name": POOL})})
    operator, has_cancelled, cancel = train(spec), threading.Event(), JobHandle.cancel
    monkeypatch.setattr(JobHandle, "cancel", lambda *args, **kwargs: (cancel(*args, **kwargs), has_cancelled.set())[0])

    def newer_try() -> None:
        running(on_fake_head)
        newer = jobs.submit(on_pool, holder=RUN, key="train/-1")
        operator.on_kill()
        wait_until(has_cancelled.is_set, "the end of the old try")
        result = {"job_id": newer.job_id, "attempt": 1, **RESULT}
        attempts.end(Store(), Key(newer.job_id, 1), JobState.SUCCEEDED, 2.0, result=result)

    newer = meanwhile(newer_try)
    with pytest.raises(TaskKilledError):
        operator.execute(context)
    newer.join()
    assert [job.state for job in jobs.list_jobs()] == [JobState.SUCCEEDED]
    assert not on_fake_head.stops


def test_a_retry_of_a_task_waits_for_its_job_though_its_template_has_another_value(on_fake_head, spec, context):
    """And a job that the user clears ends, though its old try did not end it."""
    with DAG("a_dag", schedule=None):
        written = train({**spec.document(), "n_estimators": "{{ rounds }}"}, cancel_on_kill=False)
    killed = written.prepare_for_execution()
    killed.spec = spec
    killed.on_kill()
    with pytest.raises(TaskKilledError):
        killed.execute(context)
    context["task_state_store"] = shown = SimpleNamespace(kept={}, set=lambda *pair: shown.kept.update([pair]))
    context["ti"].try_number = 2
    retry = written.prepare_for_execution()
    retry.spec = spec.model_copy(update={"n_estimators": 7})
    driver = meanwhile(ended, JobState.SUCCEEDED)
    result = retry.execute(context)
    driver.join()
    (job,) = jobs.list_jobs()
    assert (result["job_id"], result["attempt"]) == (job.job_id, 1)
    assert shown.kept == {"shoal_job_id": job.job_id}

    context["ti"].try_number = 3  # Airflow could not store the result
    retry = written.prepare_for_execution()
    retry.spec = spec.model_copy(update={"n_estimators": 8})
    assert retry.execute(context) == result

    context["ti"].try_number, context["ti"].max_tries = 4, 3  # cleared after its third try
    driver = meanwhile(ended, JobState.SUCCEEDED)
    assert train(spec).execute(context)["attempt"] == 2
    driver.join()


def test_a_task_that_times_out_takes_its_job_with_it(on_fake_head, spec, context, monkeypatch):
    def too_long() -> None:
        raise AirflowTaskTimeout("Timeout, PID: 1")

    operator = train(spec)
    monkeypatch.setattr(operator, "end_if_killed", too_long)  # where SIGALRM raises it
    with pytest.raises(AirflowTaskTimeout):
        operator.execute(context)
    assert [job.state for job in jobs.list_jobs()] == [JobState.CANCELLED]


def asked() -> jobs.FunctionJobSpec:
    """What the only job was asked for."""
    (job,) = jobs.list_jobs()
    return jobs.parse_spec(row(job).spec)


def test_a_function_by_name_or_by_value_is_a_job(on_fake_head, context, tmp_path):
    driver = meanwhile(ended, JobState.SUCCEEDED)
    named = train(None, framework="pytorch", train_func="pkg.module:train", op_args=[3], op_kwargs={"rate": 0.1})
    named.execute(context)
    driver.join()
    assert (asked().train_func, asked().args, asked().kwargs) == ("pkg.module:train", (3,), {"rate": 0.1})


def test_a_prediction_is_a_job(on_fake_head, context, tmp_path):
    predict = BatchPredictOperator(
        task_id="predict",
        model="models:/delays@champion",
        dataset={"paths": [str(tmp_path)]},
        output_path=str(tmp_path / "out"),
        spec={"keep_cols": ["id"]},
        pool_name=POOL,
    )
    predict.model = "models:/delays"
    with pytest.raises(AirflowFailException, match="names no version"):
        predict.execute(context)
    predict.model = "models:/delays@champion"
    driver = meanwhile(ended, JobState.SUCCEEDED)
    predict.execute(context)
    driver.join()
    assert (asked().framework, asked().model, asked().keep_cols) == ("predict", "models:/delays@champion", ("id",))
    assert set(BatchPredictOperator.template_fields) >= {"model", "dataset", "output_path", "spec", "pool_name"}


def test_models_per_partition_are_a_job(on_fake_head, context, tmp_path):
    estimator = {"input_cols": ["price"], "label_col": "sold"}
    models = ManyModelsOperator(
        task_id="models", dataset={"paths": [str(tmp_path)]}, by="store", estimator=estimator, pool_name=POOL
    )
    driver = meanwhile(ended, JobState.SUCCEEDED)
    models.execute(context)
    driver.join()
    assert (asked().framework, asked().by, asked().estimator.label_col) == ("partitions", ("store",), "sold")
    assert models.job_label == "models by store"
    with pytest.raises(InvalidArgumentError, match=r"estimator\.label_col"):
        ManyModelsOperator(task_id="wrong", dataset={"paths": ["/x"]}, by="store", estimator={"input_cols": ["a"]})
    with pytest.raises(InvalidArgumentError, match="exactly one of them is required"):
        ManyModelsOperator(task_id="neither", dataset={"paths": ["/x"]}, by="store")


def test_mapped_models_per_partition_need_no_function():
    estimator = {"input_cols": ["price"], "label_col": "sold"}
    with DAG("a_dag", schedule=None):
        models = ManyModelsOperator.partial(task_id="models", by="store", estimator=estimator, pool_name=POOL)
        models.expand(dataset=[{"paths": ["/x"]}, {"paths": ["/y"]}])
        neither = ManyModelsOperator.partial(task_id="neither", by="store", pool_name=POOL)
        with pytest.raises(InvalidArgumentError, match=r"exactly one of them is required .*dataset\[0\]"):
            neither.expand(dataset=[{"paths": ["/x"]}])


def test_a_function_per_partition_travels_with_its_arguments(on_fake_head, context, tmp_path):
    driver = meanwhile(ended, JobState.SUCCEEDED)
    ManyModelsOperator(
        task_id="models",
        dataset={"paths": [str(tmp_path)]},
        by=["store", "item"],
        function=lambda rows, key, rate: (rows, key, rate),
        function_kwargs={"rate": 0.1},
        pool_name=POOL,
    ).execute(context)
    driver.join()
    saved = cloudpickle.loads(Path(asked().program).read_bytes())
    assert cloudpickle.loads(saved("rows", "key").content) == ("rows", "key", 0.1)


def test_a_search_is_a_job(on_fake_head, context, tmp_path):
    train = {"dataset": {"paths": [str(tmp_path)]}, "input_cols": ["a"], "label_col": "y"}
    search = TuneOperator(
        task_id="tune", space={"eta": [0.1, 0.3]}, train=train, trials=3, spec={"sampler": "grid"}, pool_name=POOL
    )
    driver = meanwhile(ended, JobState.SUCCEEDED)
    search.execute(context)
    driver.join()
    assert (asked().framework, asked().trials, asked().sampler) == ("tune", 3, "grid")
    for wrong, message in (
        ({"space": {}}, "space is empty"),
        ({"train": {**train, "dataset": {"paths": ["here"]}}}, "relative path"),
        ({"trials": 0}, "trials"),
        ({"spec": {"sampler": "best"}}, "sampler"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            TuneOperator(**{"task_id": "t", "space": {"eta": [0.1]}, "train": train, "pool_name": POOL, **wrong})


def test_a_prediction_can_take_its_spec_from_an_earlier_task(on_fake_head, context, tmp_path):
    with DAG("a_dag", schedule=None):
        spec = task(task_id="choose")(lambda: {})()
        predict = BatchPredictOperator(
            task_id="predict", model="models:/m@c", dataset={"paths": ["/x"]}, output_path="/out", spec=spec
        )
    assert predict.upstream_task_ids == {"choose"}
    predict.spec = {"run_config": {"artifact_location": "out"}}
    with pytest.raises(AirflowFailException, match="artifact_location is the relative path"):
        predict.execute(context)
    assert on_fake_head.submissions == 0


def test_a_callable_travels_with_its_arguments(on_fake_head, context, tmp_path):
    driver = meanwhile(ended, JobState.SUCCEEDED)
    others = {"hyper_params": {"rate": 0.1}, "run_config": {"artifact_location": str(tmp_path)}}
    train(others, train_func=lambda times: times * 2, op_args=[4]).execute(context)
    driver.join()
    assert (asked().name, asked().hyper_params) == ("<lambda>", {"rate": 0.1})
    assert cloudpickle.loads(Path(asked().program).read_bytes())() == 8


def test_a_decorated_task_returns_what_each_rank_returned(on_fake_head, context, monkeypatch):
    from shoal.airflow.task_decorators import distributed_task

    @distributed_task(num_workers=2, gpus=4, gpu_type="H100", pool_name=POOL, spec={"hyper_params": {"rate": 0.1}})
    def everywhere(number, run_id=None):
        return number

    monkeypatch.setattr("shoal.jobs.load_results", lambda result, artifact_location: SimpleNamespace(results=values))
    values = (1, {"loss": [math.nan, (-math.inf, math.inf)]})
    with DAG("a_dag", schedule=None):
        operator = everywhere(5).operator
    driver = meanwhile(ended, JobState.SUCCEEDED)
    returned = operator.execute({**context, "run_id": "a_run"})
    assert returned == [1, {"loss": ["NaN", ("-Infinity", "Infinity")]}]
    driver.join()
    each = {"num_cpus": 1, "num_gpus": 2, "gpu_type": "H100"}
    assert asked().scaling_config.model_dump() == {"num_workers": 2, "resource_requirements_per_worker": each}
    assert asked().hyper_params == {"rate": 0.1}
    program = cloudpickle.loads(Path(asked().program).read_bytes())
    assert (program.args, program.kwargs) == ((5,), {"run_id": "a_run"})


def test_a_launched_task_returns_what_its_one_process_returned(on_fake_head, context, monkeypatch):
    from shoal.airflow.task_decorators import ray_launch_task

    @ray_launch_task(num_workers=3, num_cpus=2, pool_name=POOL)
    def total(numbers):
        return sum(numbers)

    monkeypatch.setattr("shoal.jobs.load_results", lambda result, artifact_location: SimpleNamespace(results=(6,)))
    with DAG("a_dag", schedule=None):
        operator = total([1, 2, 3]).operator
    driver = meanwhile(ended, JobState.SUCCEEDED)
    assert operator.execute(context) == 6
    driver.join()
    assert asked().scaling_config == launched()
    assert asked().room_for == spread(0, 3, 2, None)
    assert cloudpickle.loads(Path(asked().program).read_bytes()).args == ([1, 2, 3],)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "task train: neither a spec nor a train_func is given"),
        ({"train_func": 3}, "must be a function, the name of a function"),
        (
            {"train_func": len, "framework": "xgboost"},
            'train_func requires framework="pytorch", not framework="xgboost"',
        ),
        ({"train_func": len, "spec": {"args": [1]}}, "if train_func is given, spec must not contain args"),
        ({"train_func": len, "op_args": "abc"}, "arguments must be a list"),
        ({"train_func": "train.py", "op_kwargs": {"epochs": 3}}, "a script accepts only command line arguments"),
        ({"spec": {"framework": "pytorch"}, "framework": "lightgbm"}, 'contradicts framework="pytorch" in the spec'),
        ({"spec": {"framework": "pytorch"}, "op_args": [1]}, "but train_func is not"),
        ({"spec": {"dataset": {"paths": ["flights/"]}}}, 'task train: dataset.paths is the relative path "flights/"'),
        ({"spec": {"dataset_map": {"a": {"paths": ["x-{{ ds }}"]}}}}, "task train: dataset_map.a.paths is the rel"),
        ({"spec": {"register": {"holdout": {"paths": ["h"]}}}}, "task train: register.holdout.paths is the relative"),
        ({"spec": {"run_config": {"artifact_location": "out"}}}, "task train: run_config.artifact_location"),
        ({"spec": {"run_config": {"code": ["./mypkg"]}}}, 'task train: run_config.code is the relative path "./my'),
        ({"spec": {"run_config": RunConfig(code=("./mypkg",))}}, "task train: run_config.code is the relative path"),
        ({"spec": {"dataset": DatasetSpec(paths=("flights",))}}, "task train: dataset.paths is the relative path"),
        ({"train_func": "train.py"}, 'task train: train_func is the relative path "train.py"'),
    ],
)
def test_what_cannot_be_is_refused_with_the_dag(given, says):
    with pytest.raises(InvalidArgumentError, match=says):
        DistributedTrainOperator(task_id="train", pool_name=POOL, **given)


def test_a_path_that_a_template_gives_is_checked_in_the_task(on_fake_head, context):
    columns = {"label_col": "y", "input_cols": ["x"]}
    operator = train({"dataset": {"paths": ["{{ params.folder }}/x", "/data/x", "s3://b/x"]}, **columns})
    operator.spec = {**operator.spec, "dataset": {"paths": ["flights/x"]}}
    with pytest.raises(AirflowFailException, match='relative path "flights/x", but the working folder of an Airflow'):
        operator.execute(context)
    with pytest.raises(InvalidArgumentError, match="task predict: output_path is the relative path"):
        BatchPredictOperator(task_id="predict", model="models:/m@champion", dataset={"paths": ["/x"]}, output_path="p")
    assert on_fake_head.submissions == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train_func": "/nowhere.py"}, "nowhere.py.* cannot be read"),
        ({"train_func": len}, "len cannot be called with the given arguments: missing a required argument"),
    ],
)
def test_what_a_function_lacks_is_said(on_fake_head, context, given, says):
    operator = DistributedTrainOperator(task_id="train", pool_name=POOL, **given)
    with pytest.raises(AirflowFailException, match=says):
        operator.execute(context)
    assert on_fake_head.submissions == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"spec": "{{ params.spec }}"}, "spec of @task.distributed must be a dict"),
        ({"spec": {"scaling_config": {}}}, "must not contain scaling_config"),
        ({"gpus": 3, "num_workers": 2}, "gpus=3 cannot be divided"),
        ({"multiple_outputs": True}, "returns a list"),
    ],
)
def test_what_a_decorated_task_cannot_be_is_refused(given, says):
    from shoal.airflow.task_decorators import distributed_task, ray_launch_task

    with DAG("a_dag", schedule=None), pytest.raises(InvalidArgumentError, match=says):
        distributed_task(pool_name=POOL, **given)(lambda: None)()
    with DAG("a_dag", schedule=None), pytest.raises(InvalidArgumentError, match=r"of @task\.ray_launch must be a dict"):
        ray_launch_task(pool_name=POOL, spec="{{ params.spec }}")(lambda: None)()


def test_a_training_without_its_pool_names_the_task_that_starts_it(fresh_home, spec, context):
    with DAG("a_dag", schedule=None), pool_for_run(size=1, pool_name="local://gone") as pool:
        operator = DistributedTrainOperator(task_id="train", pool_name="local://gone", spec=spec)
    with Store().transaction() as session:
        commands.begin_life(session, PoolSpec(name="gone"), owner=None, now=0.0)
        session.get_one(Pool, "gone").state = PoolState.DOWN
    said = f'pool "gone" is down: .* the task {pool.setup.task_id} leases the nodes: .*`shoal train-again a_dag a_run`'
    with pytest.raises(PoolDownError, match=said):
        operator.execute(context)


def test_a_missing_token_is_not_explained_by_the_setup_task(on_fake_head, spec, context):
    """Another user has started the pool: to clear the setup task would not help."""
    on_fake_head.endpoint.token_path.unlink()
    with pytest.raises(NoTokenError, match="there is no token file") as raised:
        train(spec, lease="lease_pool").execute(context)
    assert "lease_pool" not in str(raised.value)


def test_a_task_that_is_tested_alone_leaves_no_lease_and_says_where_its_nodes_are(up, spec, context):
    """`airflow tasks test` makes a run of its own for each call."""
    context["dag_run"].run_id = "__airflow_temporary_run_2026-01-01T00:00:00+00:00__"
    with DAG("a_dag", schedule=None), pool_for_run(size=2, pool_name="tiny") as pool:
        operator = DistributedTrainOperator(task_id="train", pool_name="tiny", spec=spec)
    assert pool.setup.execute(context) == "tiny"
    assert (up.describe().leases, up.describe().target) == ((), 1)
    up.down()
    with pytest.raises(PoolDownError, match=r"does not run the task lease_pool, .* `airflow dags test a_dag`"):
        operator.execute(context)


def test_a_training_whose_lease_has_ended_is_refused_unless_it_has_a_job(on_fake_head, spec, context):
    """The DAG was paused after its setup task, and the pool is up for other runs."""
    operator = train(spec, lease="lease_pool", wait_for_completion=False)

    @contextmanager
    def leased() -> Iterator[None]:
        with Store().transaction() as session:
            options = LeaseOptions()
            commands.lease(session, POOL, 1, exclusive=False, holder=RUN, ttl=9.0, options=options, now=time.time())
        yield
        with Store().transaction() as session:
            commands.release(session, POOL, RUN, time.time())

    with leased():
        pass
    with pytest.raises(AirflowFailException, match=r"has expired or was released.* `shoal train-again a_dag a_run`"):
        operator.execute(context)
    assert on_fake_head.submissions == 0
    with leased():
        job = operator.execute(context)
    assert operator.execute(context) == job
    assert on_fake_head.submissions == 1


def test_a_spec_that_a_template_makes_wrong_is_refused_by_name(on_fake_head, spec, context):
    operator = train({**spec.document(), "n_estimators": "{{ dag_run.run_id }}"})
    operator.render_template_fields(context)
    with pytest.raises(AirflowFailException, match="n_estimators='a_run': Input should be a valid integer"):
        operator.execute(context)
    assert on_fake_head.submissions == 0


def test_the_task_has_the_links_of_its_job_and_airflow_knows_their_names(on_fake_head, spec, context, monkeypatch):
    monkeypatch.setitem(RESULT, "mlflow_run_id", "r")
    with DAG("a_dag", schedule=None) as dag:
        task = train({**spec.document(), "tracking": {"uri": "http://mlflow:5000"}})
    driver = meanwhile(ended, JobState.SUCCEEDED)
    task.execute(context)
    driver.join()
    (job,) = jobs.list_jobs()
    expected = [f"/shoal/jobs/{job.job_id}", "http://mlflow:5000/#/runs/r", "", ""]
    assert [link.get_link(task, ti_key=None) for link in LINKS] == expected
    read = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("train")
    assert set(read.extra_links) == {link.name for link in LINKS}
