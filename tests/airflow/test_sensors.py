from __future__ import annotations

import time

import pytest
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.sensors import NodesSensor
from shoal.errors import PoolNotFoundError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile
from shoal.state import Store
from shoal.state.schema import Lease
from tests.airflow.conftest import RUN
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until


@pytest.fixture
def mine(tiny):
    return ComputePool("local://tiny?max_nodes=4", holder=RUN).up()


def sensor(expected: int = 2, **given) -> NodesSensor:
    return NodesSensor(task_id="wait", expected_nodes=expected, pool_name="tiny", **given)


def test_it_waits_until_they_are_ready(mine, context):
    mine.lease(2, is_async=True)
    assert sensor().poke(context) is False
    wait_until(lambda: reconcile(Store(), "tiny") and sensor().poke(context), "the nodes")


def test_it_waits_while_the_lease_of_the_run_is_in_the_queue(mine, context):
    other = ComputePool("tiny", holder="test:other")
    other.lease(3, exclusive=True)
    mine.lease(2, exclusive=True, is_async=True)
    assert sensor().poke(context) is False  # the three nodes are the other's
    other.release()
    wait_until(lambda: reconcile(Store(), "tiny") and sensor().poke(context), "its turn")


def test_each_look_renews_the_lease_of_the_run(mine, context):
    lease = mine.lease(2, ttl=100)
    with Store().transaction() as session:
        session.get_one(Lease, lease.id).expires_at = time.time() + 5
    sensor().poke(context)
    with Store().transaction() as session:
        assert session.get_one(Lease, lease.id).expires_at > time.time() + 90


def test_it_fails_at_once_when_what_it_waits_for_was_rolled_back(mine, context, tiny):
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError):
        mine.lease(2)
    with pytest.raises(AirflowFailException, match=r"the target of the pool is 1: .*3 nodes failed to start\n.*quota"):
        sensor().poke(context)


def test_it_fails_at_once_when_the_pool_is_down(mine, context):
    mine.down()
    with pytest.raises(AirflowFailException, match=r"the pool is down$"):
        sensor().poke(context)
    with pytest.raises(AirflowFailException, match=r"the task lease_pool leases .* `shoal train-again a_dag a_run`"):
        sensor(lease="lease_pool").poke(context)


def test_a_pool_that_is_not_there(tiny, context):
    with pytest.raises(PoolNotFoundError):
        sensor().poke(context)
