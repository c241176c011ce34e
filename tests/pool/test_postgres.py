"""The life of a pool whose store is in PostgreSQL."""

from __future__ import annotations

import signal

import pytest

from shoal.errors import PoolDownError, ScaleError
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.schema import NodeState, Pool
from tests.support import killed_pool_operations as act
from tests.support.pool_processes import folders, node_processes, node_rows, nothing_left, tagged
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until


@pytest.fixture
def up(on_postgresql, tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def test_up_scale_lease_rollback_and_down(up, tiny):
    assert not (tiny / "state.db").exists()
    assert up.scale(2)
    with up.lease(3):
        assert len(up.get_nodes()) == 3
    wait_until(lambda: sweep(Store()) == [] and len(node_rows()) == 2, "the leased node's end")
    (tiny / FAIL_FILE).write_text("quota exceeded")
    with pytest.raises(ScaleError, match=r"rolled back to 2\n.*quota exceeded"):
        up.scale(4)
    assert len(up.get_nodes()) == 2
    up.down()
    nothing_left()
    with pytest.raises(PoolDownError):
        up.scale(2)


def test_what_a_killed_process_leaves_is_finished_by_one_sweep(up):
    assert act.fork("tiny", "growing", "after start") is None  # it was killed

    def settled() -> bool:
        return sweep(Store()) == [] and [node.state for node in node_rows()] == [NodeState.READY] * 3

    wait_until(settled, "3 nodes", seconds=120)
    assert folders() == sorted(node.id for node in node_rows())
    wait_until(lambda: len(tagged()) == 3 * 3, "no process too many")  # one drops its tag as it starts


def test_a_killed_node_is_replaced(up):
    up.scale(2)
    worker = next(node for node in node_rows() if not node.is_head)
    ProcessId.from_json(worker.supervisor).signal(signal.SIGKILL)
    wait_until(lambda: (sweep(Store()), len(up.get_nodes()) == 2)[1] and worker.id not in folders(), "its replacement")
    assert node_processes(worker) == []


def test_a_sweep_leaves_the_pools_of_other_hosts_alone(up, monkeypatch):
    """They share the store, and each host ends what is its own."""
    before = [node.supervisor for node in node_rows()]
    with Store().transaction() as session:
        pool = session.get_one(Pool, "tiny")
        mine = pool.host, pool.host_id
        pool.host, pool.host_id = "elsewhere", "0" * 16
    assert sweep(Store()) == []
    assert [node.supervisor for node in node_rows()] == before
    assert ProcessId.from_json(before[0]).alive()
    assert len(up.get_nodes()) == 1  # seen from here all the same
    with pytest.raises(PoolDownError, match="local to host elsewhere"):
        up.down()
    with Store().transaction() as session:
        pool = session.get_one(Pool, "tiny")
        pool.host, pool.host_id = mine


def test_a_shell_without_the_url_sweeps_nothing_of_it(up, monkeypatch):
    before = [node.supervisor for node in node_rows()]
    with monkeypatch.context() as patch:
        patch.delenv("SHOAL_STATE_URL")
        assert sweep(Store()) == []
    assert [node.supervisor for node in node_rows()] == before
    assert ProcessId.from_json(before[0]).alive()
    assert len(up.get_nodes()) == 1
