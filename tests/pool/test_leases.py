from __future__ import annotations

import pytest

from shoal.errors import FencedError, InvalidArgumentError, PoolDownError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.reconcile import reconcile
from shoal.state import Store
from shoal.state.schema import Lease
from tests.pool.looking import rows
from tests.pool.tiny import FAIL_FILE
from tests.waiting import wait_until


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4", holder="test:a").up()


def other():
    return ComputePool("tiny", holder="test:b")


def nodes_are(count: int) -> None:
    wait_until(lambda: reconcile(Store(), "tiny") and len(rows()) == count, f"{count} nodes")


def test_the_pool_grows_for_the_duration(up):
    with up.lease(3) as lease:
        assert len(up.get_nodes()) == 3
        assert [(one.holder, one.size) for one in up.describe().leases] == [("test:a", 3)]
        lease.renew()
    nodes_are(1)
    assert up.describe().leases == ()


def test_it_is_released_when_the_block_raises(up):
    with pytest.raises(RuntimeError), up.lease(2):
        raise RuntimeError
    nodes_are(1)


def test_the_largest_claim_wins_and_one_release_takes_no_node_of_another(up):
    up.lease(3)
    other().lease(2)
    assert up.scale(1)
    assert up.describe().target == 3
    up.release()
    nodes_are(2)
    assert other().release() is True
    nodes_are(1)
    assert other().release() is False


def test_asking_again_renews_under_a_new_epoch_and_fences_the_older_one(up):
    first = up.lease(2)
    second = up.lease(3)
    assert (first.id, second.epoch) == (second.id, first.epoch + 1)
    second.renew()
    with pytest.raises(FencedError, match="somebody took it over"):
        first.renew()
    assert up.renew() is True


def test_it_expires_and_its_late_holder_is_refused(up):
    lease = up.lease(2)
    with Store().transaction() as session:
        session.get_one(Lease, lease.id).expires_at = 1.0
    nodes_are(1)
    with pytest.raises(FencedError, match="expired or was released"):
        lease.renew()
    assert up.renew() is False


def test_nodes_that_do_not_come_take_the_claim_back(up, tiny):
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError, match="quota"):
        up.lease(3)
    assert up.describe().leases == ()
    assert up.describe().target == 1
    nodes_are(1)


def test_what_is_refused(up):
    with pytest.raises(InvalidArgumentError, match="a lease of 5 is above MAX_NODES=4"):
        up.lease(5)
    with pytest.raises(InvalidArgumentError, match="ttl"):
        up.lease(2, ttl=0)
    with pytest.raises(InvalidArgumentError, match="size=0"):
        up.lease(0)
    up.down()
    with pytest.raises(PoolDownError):
        up.lease(2)
