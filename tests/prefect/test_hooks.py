"""Hooks and the janitor's look: what a run left is ended, and nothing of a run that goes on."""

from __future__ import annotations

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Crashed, Running

from shoal.pool.api import ComputePool as CorePool
from shoal.prefect import clean_up_ended_runs, clean_up_run

pytestmark = pytest.mark.server


@pytest.fixture
def up(server, tiny):
    return CorePool("local://tiny?max_nodes=4").up()


def leave_a_lease_behind() -> None:
    CorePool("tiny", holder=f"prefect:{flow_run.id}").lease(2)


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
