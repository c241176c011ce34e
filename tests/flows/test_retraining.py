"""The retraining flow on a real pool: it works, and however it fails, the pool is as it was and the cause is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed

from shoal.examples import flights
from shoal.jobs import list_jobs, sweep
from shoal.prefect import adistributed_train, clean_up_ended_runs, pool_lease
from tests.support.plain_training import plain_digest
from tests.support.pool_processes import a_worker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.server]
FILE = "flows/scheduled_retraining_flow.py"


@pytest.fixture
def retrain(server, real_pool):
    return load_flow_from_entrypoint(f"{FILE}:retrain")


@pytest.fixture
def restored(real_pool):
    """Says whether the pool is at its own demand, with no lease and no job."""
    real_pool.scale(1)

    def check() -> bool:
        status = real_pool.describe()
        at_demand = len(status.active) == 1 and not (status.leases or status.leaving or status.pending)
        return at_demand and all(job.state not in ("pending", "running") for job in list_jobs("tests"))

    yield check
    assert wait_until(check, "the pool to be back at its demand")


def test_a_scheduled_run_trains_on_months_that_have_ended():
    """`flow_run.scheduled_start_time`, by which the flow chooses them, is also what a late run has."""
    prepare = load_flow_from_entrypoint(f"{FILE}:retrain").fn.__globals__["prepare"]
    spec = prepare.fn(None, datetime(2026, 3, 1, 6, tzinfo=UTC), 5)
    months = [Path(path).stem for path in (*spec.dataset.paths, *spec.register_as.holdout.paths)]
    assert months == ["2025-08", "2025-09", "2025-10", "2025-11", "2025-12", "2026-01", "2026-02"]


@pytest.mark.long
@pytest.mark.timeout(600)  # 122 s here on 2 CPUs, beside the other half of the tests
def test_two_months_at_once_each_get_their_own_model(retrain, restored, real_pool):
    with ThreadPoolExecutor() as threads:
        months = [threads.submit(retrain, month, 5, "tests") for month in (2, 3)]
        first, second = (month.result() for month in months)
    assert first["rows"] < second["rows"]
    assert {first["num_workers"], second["num_workers"]} == {3}
    assert abs(int(first["model_version"]) - int(second["model_version"])) == 1
    assert first["model_digest"] == plain_digest(real_pool, month=2, rounds=5)
    assert first["mlflow_run_id"] != second["mlflow_run_id"]
    assert first["metrics"] != second["metrics"]
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(like_="shoal-model-%")
        reports = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    assert {first["job_id"], second["job_id"]} <= {report.description.rpartition(" ")[2] for report in reports}


@pytest.mark.long
def test_a_bad_parameter_fails_the_run_and_restores_the_pool(retrain, restored, monkeypatch, logged):
    monkeypatch.setitem(flights.PARAMS, "eval_metric", "nonsense")
    ended = retrain(2, 5, "tests", return_state=True)
    assert ended.is_failed()
    assert "nonsense" in ended.message
    assert wait_until(restored, "the pool as it was", 60)  # a busy node is drained first
    assert "XGBoost refuses the parameters" in logged("Unknown metric function nonsense")


def test_a_killed_worker_fails_the_run_and_restores_the_pool(retrain, restored):
    killing = threading.Thread(target=lambda: wait_until(a_worker, "a worker", 120).kill())
    killing.start()
    ended = retrain(2, 100_000, "tests", return_state=True)
    killing.join()
    assert ended.is_failed()
    assert "was lost" in ended.message
    assert wait_until(restored, "the pool as it was", 60)  # a busy node is drained first


_RETRAIN = """
import sys
from prefect.flows import load_flow_from_entrypoint
from shoal.examples import flights
make = flights.retraining_spec
def soon_orphaned(month, n_estimators):
    spec = make(month, n_estimators=n_estimators)
    return spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"orphan_after": 10.0})})
flights.retraining_spec = soon_orphaned
load_flow_from_entrypoint("%s:retrain")(2, 100_000, "tests")
"""


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_the_flows_process_is_ended(retrain, restored, real_pool, how):
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    process = subprocess.Popen([sys.executable, "-c", _RETRAIN % FILE], env=environment)
    job = wait_until(lambda: next(iter(list_jobs("tests", states=["running"])), None), "the job to run", 120)
    process.send_signal(how)
    process.wait(60)
    run_id = job.holder.removeprefix("prefect:")
    if how is signal.SIGTERM:  # what Prefect sends to cancel
        assert wait_until(restored, "the pool as it was", 60)  # a busy node is drained first
        assert list_jobs("tests")[0].error == "its Prefect run was cancelled"
        return
    wait_until(lambda: list_jobs("tests")[0].state == "cancelled", "the job to end itself")
    assert "no process has polled the job" in list_jobs("tests")[0].error
    assert clean_up_ended_runs() == []  # nobody has told the server yet
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Crashed(), force=True)  # as the automation does when the heartbeat stops
    assert "released the lease" in clean_up_ended_runs()[0]
    sweep()


def test_an_async_run_that_is_cancelled_cancels_its_job(server, restored):
    @flow
    async def cancelled():
        import asyncio

        async with pool_lease(2, pool_name="tests"):
            training = asyncio.ensure_future(
                adistributed_train(flights.retraining_spec(2, n_estimators=100_000), pool_name="tests")
            )
            await asyncio.to_thread(wait_until, lambda: list_jobs("tests", states=["running"]), "the job to run", 120)
            training.cancel()
            await asyncio.wait([training])
            return list_jobs("tests")[0].state.value

    import asyncio

    assert asyncio.run(cancelled()) == "cancelled"
