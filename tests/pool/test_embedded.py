"""A pool that belongs to a process goes with it."""

from __future__ import annotations

import subprocess
import sys

from shoal.pool.api import ComputePool, list_pools
from shoal.pool.holder import job_holder
from shoal.pool.reconcile.sweep import sweep
from shoal.state import Store
from shoal.state.process import ProcessId
from tests.support.pool_processes import node_rows, nothing_left
from tests.support.waiting import wait_until


def test_it_goes_when_its_process_goes(tiny):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ComputePool("local://mine").up(owner=ProcessId.of(owner.pid))
    assert len(node_rows()) == 1
    assert sweep(Store()) == []
    assert list_pools() == []  # nobody else means it when only one pool is there
    owner.kill()
    owner.wait()
    wait_until(lambda: sweep(Store()) == [] and not node_rows(), "its end")
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
