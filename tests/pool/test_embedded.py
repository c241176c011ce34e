"""A pool that belongs to a process goes with it."""

from __future__ import annotations

import subprocess
import sys
import time

from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.holder import job_holder
from shoal.pool.reconciling import sweep
from shoal.pool.waiting import end_if_abandoned
from shoal.state import Store
from shoal.state.schema import JobState
from tests.support.pool_processes import node_rows, nothing_left
from tests.support.waiting import wait_until


def add_job(pool: str) -> Key:
    """Add the row of a job."""
    order = Order("nightly", pool, "me", {"framework": "xgboost", "fingerprint": "one"}, {}, None)
    job = attempts.ask(Store(), order, time.time())
    return Key(job.id, job.attempt)


def test_it_goes_with_its_jobs_when_its_process_goes(tiny):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ComputePool("local://mine").up(owner=ProcessId.of(owner.pid))
    key = add_job("mine")
    assert len(node_rows()) == 1
    assert sweep(Store()) == []
    assert list_pools() == []  # nobody else means it when only one pool is there
    end_if_abandoned(Store(), "mine")
    assert len(node_rows()) == 1, "its process runs"
    owner.kill()
    owner.wait()
    end_if_abandoned(Store(), "mine")
    assert not node_rows()
    job = attempts.load(Store(), key)
    assert (job.state, (job.error or "").partition(":")[0]) == (
        JobState.FAILED, "the process that started the job, and to which its pool belonged, has ended"
    )  # fmt: skip
    nothing_left()


def test_down_leaves_no_trace_once_its_process_has_ended(tiny):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pool = ComputePool("local://mine").up(owner=ProcessId.of(owner.pid))
    assert [status.embedded_in for status in list_pools(embedded=True)] == [f"process {owner.pid}"]
    pool.down()
    assert list_pools(embedded=True) == []
    assert pool.describe().state == "down"
    owner.kill()
    owner.wait()
    sweep(Store())
    assert not (tiny / "pools" / "mine").exists()
    nothing_left()


def test_it_outlives_its_process_while_a_job_has_a_lease_on_it(tiny):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pool = ComputePool("local://mine", holder=job_holder("job"))
    lease = pool.lease(1, bring_up=True, owner=ProcessId.of(owner.pid))
    owner.kill()
    owner.wait()
    assert sweep(Store()) == []
    assert len(node_rows()) == 1
    assert list_pools() == []
    assert [status.embedded_in for status in list_pools(embedded=True)] == ["job job"]
    lease.leave_to_job()  # there is no such job any more
    wait_until(lambda: sweep(Store()) == [] and not node_rows(), "its end")
    assert not (tiny / "pools" / "mine").exists()
    nothing_left()
