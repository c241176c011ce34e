"""Hooks and the janitor's look: what a run left is ended, and nothing of a run that goes on."""

from __future__ import annotations

import time
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, Failed, Running
from sqlalchemy import select

from shoal.pool.api import ComputePool as CorePool
from shoal.prefect import clean_up_ended_runs, clean_up_run, distributed_train
from shoal.state import Store
from shoal.state.schema import Job
from tests.support import waiting_jobs
from tests.support.job_results import result_of

pytestmark = pytest.mark.server


@pytest.fixture
def up(server, tiny):
    return CorePool("local://tiny?max_nodes=4").up()


def leave_a_lease_behind() -> None:
    CorePool("tiny", holder=f"prefect:{flow_run.id}").lease(2)


@pytest.fixture
def left_jobs(up, jobs, monkeypatch):
    """A training leaves its job in the queue."""
    monkeypatch.setattr(waiting_jobs.WaitingJob, "wait", lambda *_, **__: result_of())


def leave_a_job_behind(name: str) -> None:
    distributed_train(waiting_jobs.spec_of(name), pool_name="tiny")


def test_a_failed_run_is_cleaned_up_after(up):
    @flow(on_failure=[clean_up_run])
    def fails():
        leave_a_lease_behind()
        raise RuntimeError("boom")

    assert fails(return_state=True).is_failed()
    assert up.describe().leases == ()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_crashed_run_is_cleaned_up_after(up, stop):
    @flow(on_crashed=[clean_up_run])
    def crashes():
        leave_a_lease_behind()
        raise stop

    with pytest.raises(BaseException):  # noqa: B017, PT011
        crashes()
    assert up.describe().leases == ()


def test_the_janitor_ends_what_runs_left_that_are_over(up):
    @flow
    def killed():
        return flow_run.id

    run_id = killed()
    up_for_it = CorePool("tiny", holder=f"prefect:{run_id}")
    up_for_it.lease(2)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Running(), force=True)
        assert clean_up_ended_runs() == []
        assert [lease.holder for lease in up.describe().leases] == [f"prefect:{run_id}"]
        client.set_flow_run_state(run_id, Crashed(), force=True)
    did = clean_up_ended_runs()
    assert did[0] == f"tiny: released the lease of prefect:{run_id}: its Prefect run ended as Crashed"
    assert up.describe().leases == ()
    assert clean_up_ended_runs() == []


def test_the_janitor_leaves_alone_what_it_knows_nothing_of(up):
    holders = ["prefect:00000000-0000-4000-8000-000000000000", "prefect:by-hand", "test:other"]
    for holder in holders:
        CorePool("tiny", holder=holder).lease(2)
    assert clean_up_ended_runs() == []
    assert [lease.holder for lease in up.describe().leases] == holders


def test_the_hook_of_a_run_ends_what_its_subflows_left_and_theirs_ends_only_their_own(up, left_jobs):
    @flow
    def grandchild(name):
        leave_a_lease_behind()
        leave_a_job_behind(name)

    @flow(on_failure=[clean_up_run])
    def child():
        leave_a_job_behind("child")
        grandchild("of-the-child")
        raise RuntimeError("boom")

    @flow(on_failure=[clean_up_run])
    def parent():
        leave_a_job_behind("parent")
        grandchild("of-the-parent")
        child(return_state=True)
        assert waiting_jobs.unfinished() == {"parent", "of-the-parent"}
        raise RuntimeError("boom")

    assert parent(return_state=True).message.endswith("boom")
    assert waiting_jobs.unfinished() == set()


def test_the_jobs_of_a_deployment_end_with_the_run_that_started_it_only_if_this_was_cancelled(up, left_jobs):
    @flow
    def deployed():
        leave_a_job_behind("deployed")

    @flow
    def starts():
        return flow_run.id, run_deployment("deployed/now", timeout=0).id

    deployed.to_deployment("now").apply()
    run_id, deployed_id = starts()
    with get_client(sync_client=True) as client:
        run_flow(deployed, flow_run=client.read_flow_run(deployed_id))
        run = client.read_flow_run(UUID(run_id))
    clean_up_run(starts, run, Failed())
    assert waiting_jobs.unfinished() == {"deployed"}
    clean_up_run(starts, run, Cancelled())
    assert waiting_jobs.unfinished() == set()


@flow
def child():
    leave_a_job_behind("child")
    return flow_run.id


@flow
def parent_of_a_job(before):
    before()
    return flow_run.id, child()


def test_the_janitor_ends_the_jobs_of_subflows_of_a_run_that_was_cancelled(up, left_jobs):
    run_id, child_id = parent_of_a_job(lambda: None)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(child_id, Running(), force=True)  # the server cancels subflows up to 20 s later
        client.set_flow_run_state(run_id, Cancelled(), force=True)
    assert clean_up_ended_runs() == ["tiny: cancelled job child: its Prefect run ended as Cancelled"]
    assert clean_up_ended_runs() == []


def not_polled_for(seconds: float, **submitter: int) -> None:
    with Store().transaction() as session:
        job = session.scalars(select(Job)).one()
        job.last_polled_at, job.last_polled_clock = time.time() - seconds, None
        job.submitter = {**job.submitter, **submitter}


def test_the_janitor_leaves_a_crashed_run_alone_while_a_process_waits_for_its_job(up, left_jobs):
    run_id, child_id = parent_of_a_job(leave_a_lease_behind)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Crashed(), force=True)
        client.set_flow_run_state(child_id, Running(), force=True)
    crashed = "its Prefect run ended as Crashed"
    alone = f"prefect:{run_id} was left alone, although {crashed}: a process still waits for its job child"
    assert clean_up_ended_runs() == [alone]
    not_polled_for(250)
    assert clean_up_ended_runs() == [alone]
    not_polled_for(70, start=1)  # the submitter was killed
    did = clean_up_ended_runs()
    assert did == [
        f"tiny: cancelled job child: {crashed}",
        f"tiny: released the lease of prefect:{run_id}: {crashed}",
    ]
    assert up.describe().leases == ()


def test_the_janitor_obeys_a_failed_run_whose_process_still_waits_for_its_job(up, left_jobs):
    @flow
    def forgetful():
        leave_a_job_behind("left")
        return flow_run.id

    run_id = forgetful()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Failed(), force=True)
    assert clean_up_ended_runs() == ["tiny: cancelled job left: its Prefect run ended as Failed"]
