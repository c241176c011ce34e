"""Hours of timeouts in milliseconds: the clock is a fake, everything else is real (with tiny nodes)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shoal.errors import ScaleError
from shoal.os_processes import ProcessId, host_id
from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import NodeRef, Seen
from shoal.pool.journal import commands, rows
from shoal.pool.journal.advance import record_seen
from shoal.pool.journal.rows import KEEP_LOGS, KEEP_OPERATIONS
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import DRAIN_GRACE, LEASE_TTL, REPLACE_COOLDOWN, ROLLBACK_AFTER, START_TIMEOUT
from shoal.state import Store
from shoal.state.schema import Lease, Node, NodeState, Operation, OperationKind, OperationState, Pool
from tests.support import clocks
from tests.support.pool_processes import node_processes, node_rows, nothing_left
from tests.support.tiny_node import FAIL_FILE, SLOW_FILE
from tests.support.waiting import wait_until

DAY = 24 * 3600.0


@pytest.fixture
def clock(monkeypatch):
    return clocks.installed(monkeypatch)


@pytest.fixture
def up(tiny, clock):
    return ComputePool("local://tiny?max_nodes=4", clock=clock).up()


def test_a_forgotten_pool_goes_down_after_its_idle_timeout(up, clock):
    clock.pass_to(DAY - 60)
    assert sweep(Store(), clock=clock) == []
    clock.pass_to(DAY + 60)
    assert "tiny: the pool goes down because it was idle for 86400 s (idle_timeout)" in sweep(Store(), clock=clock)
    assert up.describe().state == "down"
    nothing_left()


def test_what_is_leased_is_not_forgotten(up, clock):
    up.lease(1, ttl=10 * DAY)
    for day in range(1, 6):
        clock.pass_to(day * DAY)
        assert sweep(Store(), clock=clock) == []
    assert up.describe().state == "up"


def test_a_lease_expires_and_a_sweep_says_so(up, clock):
    up.lease(2)
    clock.pass_to(LEASE_TTL - 60)
    assert sweep(Store(), clock=clock) == []
    clock.pass_to(LEASE_TTL + 1)
    assert sweep(Store(), clock=clock) == [f"tiny: the lease of {up.holder} expired", "tiny: ended tiny-1"]


def test_a_lease_that_was_just_renewed_survives_a_suspend(up, clock):
    """The wall clock goes on while a machine is suspended; nobody could have renewed anything meanwhile."""
    lease = up.lease(2)
    clock.set_ahead(LEASE_TTL + 3600)
    assert sweep(Store(), clock=clock) == []
    assert [one.holder for one in up.describe().leases] == [up.holder]
    lease.renew()
    assert len(up.get_nodes()) == 2
    lease.release()


def test_a_lease_of_another_boot_or_of_0_1_expires_by_the_wall_clock(up, clock):
    lease = up.lease(2)
    with Store().transaction() as session:
        session.get_one(Lease, lease.id).renewed_clock = {"clock": "another", "at": 0.0, "of": 0.0}
    assert sweep(Store(), clock=clock) == []
    clock.set_ahead(LEASE_TTL + 1)
    assert f"tiny: the lease of {up.holder} expired" in sweep(Store(), clock=clock)


def test_an_operation_that_nobody_waits_for_is_rolled_back_at_its_deadline(up, clock, tiny, monkeypatch):
    monkeypatch.setattr(
        "tests.support.tiny_pools.ForkingTinyBackend.start", lambda self, pool, nodes: None
    )  # nodes that never come
    up.scale(3, is_async=True)
    clock.pass_to(ROLLBACK_AFTER - 60)
    sweep(Store(), clock=clock)
    assert up.describe().target == 3
    clock.pass_to(ROLLBACK_AFTER + 1)
    did = sweep(Store(), clock=clock)
    assert f"tiny: scale to 3 of {up.holder}: rolled back, 1 of 3 nodes were ready at the deadline" in did
    assert up.describe().target == 1
    assert len(node_rows()) == 1


def test_replacements_that_fail_in_a_row_cool_down_and_the_reason_is_told(up, clock, tiny):
    up.scale(2)
    (tiny / FAIL_FILE).write_text("quota exceeded")
    ProcessId.from_json(node_rows()[1].supervisor).signal(signal.SIGKILL)

    def failed(times: int) -> bool:
        reconcile(Store(), "tiny", clock=clock)
        return f"{times} nodes in a row failed" in (up.describe().reason or "")

    # The killed node was young and counts as one; its replacement comes at once.
    wait_until(lambda: failed(2), "the failure of its replacement")
    assert "quota exceeded" in up.describe().reason
    names = [node.name for node in node_rows()]
    reconcile(Store(), "tiny", clock=clock)
    assert [node.name for node in node_rows()] == names  # it waits
    clock.pass_to(REPLACE_COOLDOWN + 1)
    wait_until(lambda: failed(3), "the next one's failure")
    (tiny / FAIL_FILE).unlink()
    assert up.scale(3) is True  # who asks anew does not wait
    assert up.describe().reason is None
    with Store().reading() as session:
        assert session.get_one(Pool, "tiny").cooldown_until is None  # nor does what is lost next


def slow_node(up, clock, tiny):
    """A second node, which starts and gets no further until SLOW_FILE is gone."""
    (tiny / SLOW_FILE).touch()
    up.scale(2, is_async=True)
    reconcile(Store(), "tiny", clock=clock)
    return wait_until(
        lambda: node_rows()[1] if node_rows()[1].state is NodeState.STARTING else None, "a node that starts"
    )


def test_a_node_that_comes_up_after_its_deadline_is_ended(up, clock, tiny):
    """Nobody swept meanwhile: it is the node's own supervisor that knows."""
    late = slow_node(up, clock, tiny)
    with Store().transaction() as session:
        session.get_one(Node, late.id).start_deadline = late.created_at
    (tiny / SLOW_FILE).unlink()
    wait_until(lambda: node_processes(late) == [], "its end")
    assert node_rows()[1].state is NodeState.STARTING  # it never counted
    clock.pass_to(ROLLBACK_AFTER + 1)
    sweep(Store(), clock=clock)
    assert [node.is_head for node in node_rows()] == [True]


def test_a_failure_long_ago_is_history(up, clock):
    dead = node_rows()[0]
    ProcessId.from_json(dead.supervisor).signal(signal.SIGKILL)  # which takes the kernel a moment to carry out

    def replaced() -> bool:
        reconcile(Store(), "tiny", clock=clock)
        return [node["name"] for node in up.get_nodes() if node["name"] != dead.name] != []

    wait_until(replaced, "the replacement")
    with Store().reading() as session:
        assert rows.load(session, "tiny", lock=False).pool.start_failures == 1
    clock.pass_to(3600.0)
    reconcile(Store(), "tiny", clock=clock)
    with Store().reading() as session:
        assert rows.load(session, "tiny", lock=False).pool.start_failures == 0


def test_old_logs_and_operations_are_removed_and_nothing_else(up, clock, tiny):
    logs = tiny / "pools" / "tiny" / "logs"
    for name, age in (("tiny-0", 2 * KEEP_LOGS), ("tiny-7", 2 * KEEP_LOGS), ("tiny-8", KEEP_LOGS / 2)):
        (logs / f"{name}.log").touch()
        os.utime(logs / f"{name}.log", (time.time() - age, time.time() - age))
    with Store().transaction() as session:
        for number in range(2 * KEEP_OPERATIONS):
            session.add(
                Operation(
                    id=f"old-{number:03}",
                    pool="tiny",
                    kind=OperationKind.SCALE,
                    state=OperationState.SUCCEEDED,
                    holder="test",
                    size=1,
                    deadline=0.0,
                    failures=0,
                    node_errors={},
                    created_at=float(number),
                )
            )
    sweep(Store(), clock=clock)
    assert {log.stem for log in logs.glob("*.log")} == {"tiny-0", "tiny-8"}  # tiny-0 is there, however old its log
    with Store().reading() as session:
        kept = sorted(operation.id for operation in session.query(Operation))
    assert len(kept) == KEEP_OPERATIONS
    assert "old-101" in kept and "old-100" not in kept


def test_a_paused_holder_is_refused_when_it_wakes(up, clock):
    lease = up.lease(2)
    clock.pass_to(LEASE_TTL + 1)
    sweep(Store(), clock=clock)
    assert up.renew() is False
    with pytest.raises(ScaleError, match="the target of the pool is 1"):
        up.wait_for_nodes(2)
    lease.release()  # nothing happens
    assert up.describe().target == 1


SUSPEND = 3600.0


class Rows:
    """A pool of which there is nothing but its rows: no process is started, and the test says what became of a node.

    Attributes:
        pool: Its user's side.
    """

    def __init__(self, clock: clocks.Clock) -> None:
        self.pool = ComputePool("local://tiny?max_nodes=4", clock=clock)
        self._clock = clock
        with Store().transaction() as session:
            spec = PoolSpec.parse("local://tiny?max_nodes=4")
            commands.begin_life(session, spec, owner=None, now=clock())
            commands.up(session, spec, holder="test", rollback_after=ROLLBACK_AFTER, now=clock())
        self.reconcile()
        self.arrive()
        self.reconcile()

    def reconcile(self) -> list[str]:
        """What became of operations and of the pool."""
        return list(reconcile(Store(), "tiny", clock=self._clock).decided)

    def arrive(self) -> None:
        """Have all nodes come up that were asked for."""
        self.all_are(NodeState.READY, endpoint={"gcs": "", "api": "", "ray_node_id": ""})

    def all_are(self, state: NodeState, **fields: object) -> None:
        with Store().transaction() as session:
            for node in session.query(Node):
                node.state = state
                for name, value in fields.items():
                    setattr(node, name, value)

    def states(self) -> list[NodeState]:
        return [node.state for node in node_rows()]

    def change(self, **fields: object) -> None:
        """Write into the pool's row."""
        with Store().transaction() as session:
            for name, value in fields.items():
                setattr(session.get_one(Pool, "tiny"), name, value)

    def row(self) -> Pool:
        with Store().reading() as session:
            return session.get_one(Pool, "tiny")

    def operation(self) -> tuple[OperationState, int]:
        """How far the last operation is, and how many nodes the pool is to have."""
        status = self.pool.describe()
        assert status.last_operation
        return OperationState(status.last_operation.state), status.target


def only_rows(monkeypatch, clock):
    monkeypatch.setattr("tests.support.tiny_pools.ForkingTinyBackend.start", lambda self, pool, nodes: None)
    return Rows(clock)


@pytest.fixture
def only(tiny, clock, monkeypatch):
    return only_rows(monkeypatch, clock)


@pytest.fixture
def only_on_either(either_tiny, clock, monkeypatch):
    return only_rows(monkeypatch, clock)


ROLLED_BACK = "scale to 3 of {}: rolled back, 1 of 3 nodes were ready at the deadline"


def test_an_operation_that_is_open_across_a_suspend_succeeds(only_on_either, clock):
    only = only_on_either
    only.pool.scale(3, is_async=True)
    only.reconcile()
    clock.set_ahead(SUSPEND)
    only.reconcile()
    assert only.operation() == (OperationState.OPEN, 3)
    only.arrive()
    only.reconcile()
    assert only.operation() == (OperationState.SUCCEEDED, 3)


@pytest.mark.parametrize("jump", [SUSPEND, -SUSPEND], ids=["suspend", "set back"])
def test_after_a_jump_an_operation_is_rolled_back_when_its_time_has_really_passed(only, clock, jump):
    only.pool.scale(3, is_async=True)
    only.reconcile()
    clock.set_ahead(jump)
    clock.pass_to(ROLLBACK_AFTER - 60)
    only.reconcile()
    assert only.operation() == (OperationState.OPEN, 3)
    status = only.pool.describe()
    assert status.last_operation and 0 < status.last_operation.deadline - clock() <= 60
    clock.pass_to(ROLLBACK_AFTER + 1)
    assert only.reconcile() == [ROLLED_BACK.format(only.pool.holder)]


def test_an_operation_that_settles_leaves_the_demand_of_a_later_one_alone(only, clock):
    only.pool.scale(3, is_async=True, options={"block_until_min_cluster_size": 1, "rollback_after_seconds": 60})
    only.pool.scale(4, is_async=True)
    clock.pass_to(61)
    assert [said.split(", ")[0] for said in only.reconcile()] == [f"scale to 3 of {only.pool.holder}: succeeded"]
    assert only.operation() == (OperationState.OPEN, 4)


def test_what_was_seen_of_a_node_says_nothing_of_its_next_owner(only):
    """The look at the processes is without a lock: another supervisor may have claimed the row since."""
    looked_at = [NodeRef.of(node) for node in node_rows()]
    lost = Seen(lost={node.id: "its supervisor ended" for node in looked_at})
    only.all_are(NodeState.STARTING, supervisor=ProcessId("another boot", 1, 1, "this host").to_json())
    with Store().transaction() as session:
        record_seen(rows.load(session, "tiny"), looked_at, lost)
    assert only.states() == [NodeState.STARTING]


def test_what_is_asked_for_right_after_a_suspend_has_its_own_time_only(only, clock):
    """Nothing looked at the pool between the suspend and the request."""
    clock.set_ahead(SUSPEND)
    only.pool.scale(3, is_async=True)
    clock.pass_to(ROLLBACK_AFTER + 1)
    assert only.reconcile() == [ROLLED_BACK.format(only.pool.holder)]


@pytest.mark.parametrize("want", ["up", "renew"])
def test_a_pool_that_is_wanted_right_after_a_suspend_was_not_wanted_later(only, clock, want):
    lease = only.pool.lease(1)
    clock.set_ahead(SUSPEND)
    if want == "renew":
        lease.renew()
    else:
        only.pool.up()
    only.reconcile()
    assert only.row().touched_at <= clock()


def test_a_starting_node_survives_a_suspend_and_not_its_deadline(only, clock):
    only.pool.scale(2, is_async=True, options={"rollback_after_seconds": 10 * DAY})
    only.reconcile()
    with Store().transaction() as session:
        session.get_one(Node, node_rows()[1].id).state = NodeState.STARTING
    clock.set_ahead(SUSPEND)
    only.reconcile()
    assert only.states() == [NodeState.READY, NodeState.STARTING]
    [_, starting] = node_rows()
    clock.pass_to(2 * START_TIMEOUT)
    only.reconcile()
    assert starting.id not in [node.id for node in node_rows()]


def test_a_busy_node_drains_for_its_grace_whatever_the_clock_says(only, clock):
    only.pool.scale(2, is_async=True)
    only.reconcile()
    only.arrive()
    only.reconcile()
    only.all_are(NodeState.READY, busy=True)
    only.pool.scale(1, is_async=True)
    only.reconcile()
    assert only.states() == [NodeState.READY, NodeState.DRAINING]
    clock.set_ahead(SUSPEND)
    only.reconcile()
    assert only.states() == [NodeState.READY, NodeState.DRAINING]
    clock.pass_to(DRAIN_GRACE + 1)
    only.reconcile()
    assert only.states() == [NodeState.READY]


def test_a_pool_is_not_idle_while_its_host_is_suspended(only_on_either, clock):
    only = only_on_either
    clock.set_ahead(2 * DAY)
    assert only.reconcile() == []
    assert only.row().state == "up"
    clock.pass_to(DAY + 60)
    assert only.reconcile() == ["the pool goes down because it was idle for 86400 s (idle_timeout)"]


def test_a_suspend_does_not_shorten_a_cooldown(only, clock):
    only.pool.alter(min_nodes=2)
    only.change(start_failures=2, last_failure="quota exceeded", cooldown_until=clock() + REPLACE_COOLDOWN)
    clock.set_ahead(SUSPEND)
    only.reconcile()
    assert only.states() == [NodeState.READY]
    assert "2 nodes in a row failed" in (only.pool.describe().reason or "")
    clock.pass_to(REPLACE_COOLDOWN + 1)
    only.reconcile()
    assert only.states() == [NodeState.READY, NodeState.PLANNED]


def test_a_node_that_was_suspended_is_not_older_for_it(only, clock):
    """A node that dies young counts as a failed start, and a failure is history once all nodes are old."""
    only.change(start_failures=1)
    clock.set_ahead(SUSPEND)
    only.reconcile()
    assert only.row().start_failures == 1
    only.all_are(NodeState.FAILED, error="killed")
    only.reconcile()
    assert only.row().start_failures == 2


@pytest.mark.parametrize("stamp", [None, {"clock": "another boot", "at": 0.0, "of": 0.0}], ids=["0.1", "another boot"])
def test_without_a_stamp_of_this_boot_an_operation_is_judged_by_the_wall_clock(only, clock, stamp):
    only.pool.scale(3, is_async=True)
    only.reconcile()
    only.change(clock=stamp)
    clock.set_ahead(ROLLBACK_AFTER - 60)
    assert only.reconcile() == []
    only.change(clock=stamp)
    clock.set_ahead(ROLLBACK_AFTER + 1)
    assert only.reconcile() == [ROLLED_BACK.format(only.pool.holder)]


def test_a_pool_of_another_host_keeps_that_hosts_times(only, clock):
    """Releasing a lease is all that is done from elsewhere, and every write looks at the clock."""
    only.pool.lease(1)
    only.change(host_id="another")
    before = only.row().clock
    clock.set_ahead(SUSPEND)
    try:
        only.pool.release()
        assert only.row().clock == before
    finally:
        only.change(host_id=host_id())


def test_a_supervisor_brings_its_node_up_after_a_suspend(up, clock, tiny):
    """Here the wall clock cannot be set for another process, so the row's times are put back by as much."""
    starting = slow_node(up, clock, tiny)
    with Store().transaction() as session:
        node = session.get_one(Node, starting.id)
        node.created_at, node.start_deadline = node.created_at - SUSPEND, node.start_deadline - SUSPEND
    (tiny / SLOW_FILE).unlink()
    wait_until(lambda: {node.id: node.state for node in node_rows()}[starting.id] is NodeState.READY, "the node")
