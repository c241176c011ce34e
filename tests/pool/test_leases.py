from __future__ import annotations

import multiprocessing
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import FencedError, InvalidArgumentError, PoolDownError, ScaleError
from shoal.os_processes import ProcessId
from shoal.pool import api
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.holder import job_holder
from shoal.pool.journal import commands
from shoal.pool.journal.advance import withdraw
from shoal.pool.reconciling import reconcile
from shoal.pool.spec import LeaseOptions
from shoal.state import Store
from shoal.state.schema import Job, JobState, Lease
from tests.support.pool_processes import node_rows
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4", holder="test:a").up()


def other():
    return ComputePool("tiny", holder="test:b")


def other_of_uri():
    return ComputePool("local://tiny?max_nodes=4", holder="test:b")


def nodes_are(count: int) -> None:
    wait_until(lambda: reconcile(Store(), "tiny") and len(node_rows()) == count, f"{count} nodes")


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
    with pytest.raises(FencedError, match="renew the lease with the newest handle"):
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


def test_only_its_definer_or_who_may_redefines_a_pool(tiny, caplog):
    def lease(uri, holder):
        with ComputePool(uri, holder=holder).lease(1, bring_up=True):
            return ComputePool("tiny").describe().max_nodes

    def refused(uri, holder, said):
        with pytest.raises(InvalidArgumentError, match=re.escape(said)):
            lease(uri, holder)

    first, second = "airflow:production:first", "airflow:production:second"
    two, five, eight = (f"local://tiny?max_nodes={number}" for number in (2, 5, 8))
    assert lease(two, f"{first}/monday") == 2
    by_first = f'pool "tiny" is {two}, as {first}/monday has defined it, and not {five}: write the same URI'
    refused(five, f"{second}/monday", by_first)
    with ComputePool(two, holder=f"{first}/monday").lease(1, bring_up=True):
        refused(five, f"{second}/monday", by_first)
        ComputePool("tiny").alter(max_nodes=3)
        assert lease(two, f"{second}/monday") == 3  # the definition is the same
    assert lease(five, f"{first}/tuesday") == 5
    ComputePool(eight, holder="cli:anna@host").up().down()
    refused(five, f"{first}/tuesday", f"is {eight}, as cli:anna@host has defined it, and not {five}")
    assert lease(eight, "prefect:0123/block") == 8
    with ComputePool(five, holder=f"{first}/tuesday").lease(1, bring_up=True, may_redefine=True) as connected:
        assert ComputePool("tiny").describe().max_nodes == 5
        ComputePool(two, holder="test:connected").lease(1, bring_up=True, may_redefine=True).release()
        assert ComputePool("tiny").describe().max_nodes == 5
        assert f'pool "tiny" is up with another definition; {two} counts from its next start' in caplog.text
        connected.renew()
    refused(two, f"{second}/monday", f"is {five}, as {first}/tuesday has defined it")


def test_all_flow_runs_of_prefect_are_one_definer(tiny):
    for run, most in (("0123/block", 2), ("4567/block", 5)):
        with ComputePool(f"local://tiny?max_nodes={most}", holder=f"prefect:{run}").lease(1, bring_up=True):
            assert ComputePool("tiny").describe().max_nodes == most
    with pytest.raises(InvalidArgumentError, match="as prefect:4567/block has defined it"):
        ComputePool("local://tiny", holder="cli:anna@host").lease(1, bring_up=True)


def test_the_jobs_of_a_user_are_one_definer(tiny):
    for job, most in (("one", 2), ("two", 5)):
        with ComputePool(f"local://tiny?max_nodes={most}", holder=f"job:{job}").lease(1, bring_up=True):
            assert ComputePool("tiny").describe().max_nodes == most
    with ComputePool("local://tiny?max_nodes=3").lease(1, bring_up=True):
        assert ComputePool("tiny").describe().max_nodes == 3
    with pytest.raises(InvalidArgumentError, match=r"as python:.* has defined it"):
        ComputePool("local://tiny", holder="cli:anna@host").lease(1, bring_up=True)


def test_a_pool_that_a_lease_brought_up_goes_down_with_the_last(tiny):
    a, b = (ComputePool("local://tiny?max_nodes=4", holder=f"test:{name}") for name in "ab")
    a.lease(2, bring_up=True)
    b.lease(3, bring_up=True)
    assert len(a.get_nodes()) == 3
    assert a.release() is True
    nodes_are(3)
    assert b.release() is True
    assert (b.describe().state, node_rows()) == ("down", [])
    with b.lease(1, bring_up=True):
        assert len(b.get_nodes()) == 1
    assert b.describe().state == "down"


@pytest.mark.parametrize("ask", [ComputePool.up, lambda pool: pool.scale(2)], ids=["up", "scale"])
def test_it_stays_when_somebody_sets_a_base_demand_meanwhile(tiny, ask):
    pool = ComputePool("local://tiny?max_nodes=4", holder="test:a")
    pool.lease(3, bring_up=True)
    ask(ComputePool("local://tiny?max_nodes=4", holder="test:b"))
    pool.release()
    assert pool.describe().state == "up"
    nodes_are(pool.describe().target)


def test_it_stays_while_another_ones_job_runs(tiny):
    pool = ComputePool("local://tiny?max_nodes=4", holder="test:a")
    pool.lease(2, bring_up=True)
    with Store().transaction() as session:
        job = Job(
            id="theirs", attempt=1, pool="tiny", holder="test:b", spec={}, state=JobState.RUNNING, endpoint={},
            driver=ProcessId.mine().to_json(), last_polled_at=0.0, created_at=0.0,
        )  # fmt: skip
        session.add(job)
    pool.release()
    nodes_are(1)
    with Store().transaction() as session:
        session.get_one(Job, ("theirs", 1)).state = JobState.SUCCEEDED
    wait_until(lambda: reconcile(Store(), "tiny") and pool.describe().state == "down", "the pool's end")


def test_the_lease_of_a_job_lasts_until_its_driver_has_exited(tiny):
    pool = ComputePool("local://tiny?max_nodes=4", holder=job_holder("mine"))
    first = pool.lease(2, bring_up=True)
    ended = ProcessId(ProcessId.mine().boot, ProcessId.mine().pid, 1, ProcessId.mine().host)

    def job_is(state: JobState, driver: ProcessId | None) -> None:
        with Store().transaction() as session:
            job = session.get(Job, ("mine", 1)) or Job(
                id="mine", attempt=1, pool="tiny", holder="test:b", spec={}, endpoint={},
                last_polled_at=0.0, created_at=0.0,
            )  # fmt: skip
            job.state, job.driver = state, driver and driver.to_json()
            session.add(job)

    job_is(JobState.FAILED, ended)  # an earlier attempt: the lease is for the one that is submitted next
    assert reconcile(Store(), "tiny").decided == ()
    lease = pool.lease(2)
    first.leave_to_job()  # was requested again
    assert reconcile(Store(), "tiny").decided == ()
    for state, driver in (
        (JobState.PENDING, None),
        (JobState.RUNNING, ProcessId.mine()),
        (JobState.SUCCEEDED, ProcessId.mine()),
    ):
        job_is(state, driver)
        lease.leave_to_job()
        assert reconcile(Store(), "tiny").decided == ()
    job_is(JobState.SUCCEEDED, ended)
    assert reconcile(Store(), "tiny").decided[0] == "the lease of job:mine expired"
    wait_until(lambda: reconcile(Store(), "tiny") and pool.describe().state == "down", "the pool's end")


def test_brought_up_with_nodes_that_do_not_come_it_is_down_again(tiny):
    (tiny / FAIL_FILE).write_text("quota")
    pool = ComputePool("local://tiny?max_nodes=4")
    with pytest.raises(ScaleError, match="quota"):
        pool.lease(2, bring_up=True)
    assert (pool.describe().state, node_rows()) == ("down", [])


def test_a_lease_that_is_refused_brings_nothing_up(tiny):
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=4"):
        ComputePool("local://tiny?max_nodes=4").lease(5, bring_up=True)
    assert list_pools() == []


def test_one_that_begins_while_the_last_one_ends(up):
    """The pool is on its way down: a lease that may bring it up waits for that."""
    with Store().transaction() as session:
        commands.down(session, "tiny", 0.0)
    with other_of_uri().lease(2, bring_up=True):
        assert len(up.get_nodes()) == 2


def test_a_renewal_adds_its_own_time_to_live(up):
    lease = up.lease(2, ttl=50.0)
    assert up.renew() is True
    until = up.describe().leases[0].expires_at
    assert until <= time.time() + 50.0
    lease.renew()
    assert until < up.describe().leases[0].expires_at


def test_a_block_renews_its_lease_and_says_when_it_has_lost_it(up, monkeypatch):
    monkeypatch.setattr(api, "_RENEWALS_PER_TTL", 6000)  # every 0.15 s, of a lease that outlives any slow machine
    with up.lease(1) as lease:
        first = up.describe().leases[0].expires_at
        wait_until(lambda: up.describe().leases[0].expires_at > first, "a renewal by the block's thread")
        with Store().transaction() as session:
            session.delete(session.get_one(Lease, lease.id))
        wait_until(lambda: lease.lost is not None, "the thread to notice that the lease is gone")


def test_who_waits_for_nodes_hears_why_they_do_not_come(up, tiny):
    assert up.has_nodes(1) is True
    with pytest.raises(ScaleError, match="request more with a lease or scale_cluster"):
        up.has_nodes(3)
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError):
        up.lease(3)
    (tiny / FAIL_FILE).unlink()
    other().scale(2)  # somebody else's operation is not what is told
    with pytest.raises(ScaleError, match=r"the last request of test:a was rolled back[^\n]*\n.*quota"):
        up.wait_for_nodes(3)
    assert len(up.wait_for_nodes(2)) == 2


def test_a_lease_that_cannot_grow_keeps_what_it_has(up, tiny):
    up.lease(2)
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError, match=r"rolled back to 2(.|\n)*quota"):
        up.lease(3)
    assert [lease.size for lease in up.describe().leases] == [2]
    assert len(up.get_nodes()) == 2


def test_a_lease_that_has_its_minimum_settles_at_what_it_has(up, tiny):
    up.scale(2)
    (tiny / FAIL_FILE).write_text("spot market is empty")
    up.lease(4, options={"block_until_min_cluster_size": 2})
    wait_until(lambda: reconcile(Store(), "tiny") and up.describe().last_operation.state == "succeeded", "its end")
    assert ([lease.size for lease in up.describe().leases], up.describe().target) == ([2], 2)


def test_a_lease_that_is_taken_back_goes_whatever_others_have_asked_for_since(up):
    options = LeaseOptions(rollback_after_seconds=60)
    with Store().transaction() as session:
        failing, _ = commands.lease(
            session, "tiny", 3, exclusive=False, holder="test:a", ttl=900.0, options=options, now=1e9
        )
    with Store().transaction() as session:
        commands.scale(session, "tiny", 2, holder="test:b", options=options, now=1e9 + 1)
    with Store().transaction() as session:
        withdraw(session, failing, "given up", 1e9 + 2)
    assert (up.describe().leases, up.describe().target) == ((), 2)


def third() -> ComputePool:
    return ComputePool("tiny", holder="test:c")


def queue() -> list[tuple[str, int]]:
    """Holders of the waiting leases, with their positions."""
    leases = ComputePool("tiny").describe().leases
    return [(lease.holder, lease.position) for lease in leases if lease.position is not None]


def expire(holder: str) -> None:
    """Let a lease's time to live end, as if its holder had died."""
    with Store().transaction() as session:
        session.query(Lease).filter(Lease.holder == holder).one().expires_at = 1.0


def test_exclusive_leases_add_up(up):
    up.lease(2, exclusive=True)
    other().lease(1)
    with third().lease(1, exclusive=True):
        assert (up.describe().target, len(up.get_nodes()), up.describe().leased) == (4, 4, 4)
    nodes_are(3)
    assert up.release() is True
    nodes_are(1)
    assert [(lease.holder, lease.exclusive) for lease in other().describe().leases] == [("test:b", False)]


def test_a_lease_that_does_not_fit_waits_for_its_turn_and_takes_over_the_nodes(up):
    """The third, which would fit, waits behind the second, which does not."""
    up.lease(3, exclusive=True)
    nodes = {row.id for row in node_rows()}
    seen: list[str | None] = []
    with ThreadPoolExecutor(2) as threads:
        waits = threads.submit(
            other().lease, 3, exclusive=True, on_progress=lambda status: seen.append(status.queue_note("test:b"))
        )
        wait_until(lambda: seen, "the progress")
        last = threads.submit(third().lease, 1, exclusive=True)
        wait_until(lambda: queue() == [("test:b", 1), ("test:c", 2)], "the queue")
        assert up.describe().queue_note("test:c") == "waiting for 1 lease ahead, 3 of 4 nodes are taken"
        assert up.describe().reason == "leases that wait for nodes: 2; 3 of 4 nodes are taken"
        assert other().has_nodes(3) is False  # there are 3 nodes, but not for this holder
        up.release()
        assert [waits.result(60).epoch, last.result(60).epoch] == [1, 1]
    assert seen[0] == "waiting as the next in the queue, 3 of 4 nodes are taken"
    assert other().has_nodes(3) is third().has_nodes(1) is True
    assert nodes < {row.id for row in node_rows()}
    assert (queue(), len(up.get_nodes())) == ([], 4)


def test_a_lease_whose_turn_does_not_come_is_removed_at_its_deadline(up):
    up.lease(3, exclusive=True)
    late = (
        "the lease was still waiting as the next in the queue, 3 of 4 nodes are taken: raise "
        "rollback_after_seconds=0.5, or let fewer runs wait at a time; the lease was removed"
    )
    with pytest.raises(ScaleError, match=late):
        other().lease(2, exclusive=True, options={"rollback_after_seconds": 0.5})
    assert [(lease.holder, lease.size) for lease in up.describe().leases] == [("test:a", 3)]
    assert len(up.get_nodes()) == 3


def wait_for_a_lease() -> None:
    other().lease(4, exclusive=True)


def test_a_waiting_process_that_was_killed_leaves_the_queue(up):
    up.lease(2, exclusive=True)
    process = multiprocessing.get_context("fork").Process(target=wait_for_a_lease)
    process.start()
    wait_until(lambda: queue() == [("test:b", 1)], "its request")
    third().lease(2, exclusive=True, is_async=True)
    assert queue() == [("test:b", 1), ("test:c", 2)]
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    expire("test:b")
    nodes_are(4)
    assert queue() == []


def test_a_lease_is_renewed_while_it_waits(up, monkeypatch):
    monkeypatch.setattr("shoal.pool.api._RENEWALS_PER_TTL", 600)  # ten in a second
    up.lease(4, exclusive=True)

    def expires_at() -> float:
        return next(lease.expires_at for lease in up.describe().leases if lease.holder == "test:b")

    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(other().lease, 1, exclusive=True, ttl=60.0)
        wait_until(queue, "its request")
        first = expires_at()
        wait_until(lambda: expires_at() > first, "its renewal")
        up.release()
        assert waits.result(60).epoch == 1


def test_asking_again_for_an_exclusive_lease(up):
    first = up.lease(2, exclusive=True)
    again = up.lease(2, exclusive=True)
    assert (again.id, again.epoch) == (first.id, 2)
    with pytest.raises(InvalidArgumentError, match=r"exclusive lease of 2 nodes.* cannot be changed to a shared one"):
        up.lease(2)
    other().lease(1, exclusive=True)
    with pytest.raises(ScaleError, match="cannot grow from 2 to 4 nodes: 3 of 4 nodes are taken, and 0 leases wait"):
        up.lease(4, exclusive=True)
    third().lease(3, exclusive=True, is_async=True)
    waiting = third().lease(2, exclusive=True, is_async=True)
    assert (waiting.epoch, queue()) == (2, [("test:c", 1)])
    with pytest.raises(ScaleError, match="and 1 leases wait"):
        other().lease(2, exclusive=True)
    up.lease(1, exclusive=True)
    nodes_are(4)
    assert [lease.size for lease in up.describe().leases] == [1, 1, 2]
    assert queue() == []


def test_nodes_that_do_not_come_take_back_one_exclusive_lease_and_leave_the_other(up, tiny):
    up.lease(2, exclusive=True)
    before = {row.id for row in node_rows()}
    (tiny / FAIL_FILE).write_text("quota")
    with pytest.raises(ScaleError, match=r"the lease was removed(.|\n)*quota"):
        other().lease(2, exclusive=True)
    nodes_are(2)
    assert {row.id for row in node_rows()} == before
    assert [(lease.holder, lease.size) for lease in up.describe().leases] == [("test:a", 2)]


def test_the_limit_stays_above_all_leases_together(up):
    up.lease(2, exclusive=True)
    other().lease(1, exclusive=True)
    third().lease(2, exclusive=True, is_async=True)
    with pytest.raises(InvalidArgumentError, match=r"number of nodes that its leases take together \(3 nodes\)"):
        up.alter(max_nodes=2)
    up.alter(max_nodes=5)
    assert up.scale(3)  # the base demand is no addition
    nodes_are(5)
    assert queue() == []


def test_what_is_refused(up):
    with pytest.raises(InvalidArgumentError, match="exclusive='yes'"):
        up.lease(2, exclusive="yes")
    with pytest.raises(InvalidArgumentError, match="a lease of 5 is above MAX_NODES=4"):
        up.lease(5, exclusive=True)
    with pytest.raises(InvalidArgumentError, match="a lease of 5 is above MAX_NODES=4"):
        up.lease(5)
    with pytest.raises(InvalidArgumentError, match="ttl"):
        up.lease(2, ttl=0)
    with pytest.raises(InvalidArgumentError, match="size=0"):
        up.lease(0)
    up.down()
    with pytest.raises(PoolDownError):
        up.lease(2)
