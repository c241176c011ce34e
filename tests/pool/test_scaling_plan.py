"""The plan is pure: hours of timeouts in microseconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.pool.scaling_plan import (
    MAX_START_FAILURES,
    NodePlan,
    Snapshot,
    Verdict,
    cause_of_starts,
    cooldown,
    grantable,
    judge,
    may_resize,
    nodes_for,
    plan_nodes,
    wanted,
    why_down,
)
from shoal.pool.timeouts import REPLACE_COOLDOWN, REPLACE_COOLDOWN_MOST
from shoal.state.schema import (
    Demand,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationKind,
    OperationState,
    Pool,
    PoolState,
)

NOW = 1_000_000.0


def pool(**fields):
    return Pool(**{"name": "p", "state": PoolState.UP, "min_nodes": 1, "max_nodes": 5, "epoch": 1} | fields)


def head(state=NodeState.READY, **fields):
    return node("head", state, is_head=True, head_id=None, **fields)


def node(name, state=NodeState.READY, **fields):
    defaults = {
        "id": name, "name": name, "is_head": False, "state": state, "epoch": 1, "head_id": "head", "busy": False,
        "start_deadline": NOW + 60, "created_at": NOW,
    }  # fmt: skip
    return Node(**defaults | fields)


def operation(size, **fields):
    defaults = {
        "id": "op", "kind": OperationKind.SCALE, "state": OperationState.OPEN, "size": size, "deadline": NOW + 720,
        "failures": 0, "node_errors": {}, "replaced_size": 1,
    }  # fmt: skip
    return Operation(**defaults | fields)


def snapshot(*nodes, size=1, leases=(), operations=(), of=None, set_by="op"):
    demand = Demand(pool="p", size=size, operation_id=set_by, set_at=NOW) if size else None
    return Snapshot(of or pool(), demand, tuple(leases), tuple(operations), tuple(nodes))


def lease(size, *, exclusive=False, waiting=False, number=0):
    return Lease(
        id=f"l{number or size}", holder="h", size=size, epoch=1, expires_at=NOW - 1,
        exclusive=exclusive, waiting=waiting, queue_number=number,
    )  # fmt: skip


def leases(*claims, **fields):
    """A pool of at most 6 nodes with leases, in the order of their requests.

    `x3` is an exclusive lease of 3 nodes, `s3` a shared one, `x3?` one that waits.
    """
    made = [
        lease(int(claim[1]), exclusive=claim[0] == "x", waiting=claim.endswith("?"), number=number)
        for number, claim in enumerate(claims, start=1)
    ]
    return snapshot(leases=made, **{"of": pool(max_nodes=6)} | fields)


def test_the_largest_live_demand_wins_within_the_limits():
    assert wanted(snapshot(size=2)) == 2
    assert wanted(snapshot(size=2, leases=[lease(4), lease(3)])) == 4
    assert wanted(snapshot(size=2, of=pool(min_nodes=3))) == 3
    assert wanted(snapshot(size=2, leases=[lease(4)], of=pool(max_nodes=3))) == 3
    assert wanted(snapshot(size=2, leases=[lease(4)], of=pool(state=PoolState.STOPPING))) == 0


def test_without_a_base_demand_it_lasts_as_long_as_leases_and_jobs():
    assert wanted(snapshot(size=None, leases=[lease(3)])) == 3
    assert wanted(snapshot(size=None, leases=[])) == 0
    assert wanted(replace(snapshot(size=None), works=True)) == 1


def test_the_head_comes_first():
    assert plan_nodes(snapshot(size=3), NOW) == NodePlan(start_head=True)
    assert plan_nodes(snapshot(head(NodeState.STARTING), size=3), NOW) == NodePlan()
    assert plan_nodes(snapshot(head(), size=3), NOW) == NodePlan(start_workers=2)


def test_nodes_on_their_way_count():
    assert plan_nodes(snapshot(head(), node("a", NodeState.PLANNED), size=3), NOW) == NodePlan(start_workers=1)


def test_shrinking_gives_up_what_is_not_ready_then_idle_then_busy_and_never_the_head():
    nodes = [head(busy=True), node("busy", busy=True), node("idle"), node("coming", NodeState.STARTING)]
    assert [end[0] for end in plan_nodes(snapshot(*nodes, size=3), NOW).end] == ["coming"]
    assert [end[0] for end in plan_nodes(snapshot(*nodes, size=2), NOW).end] == ["coming", "idle"]
    plan = plan_nodes(snapshot(*nodes, size=1), NOW)
    assert {end[0] for end in plan.end} == {"coming", "idle"}
    assert plan.drain == ("busy",)


def test_the_youngest_idle_node_goes_first():
    plan = plan_nodes(snapshot(head(), node("old", created_at=NOW - 9), node("new"), size=2), NOW)
    assert [end[0] for end in plan.end] == ["new"]


def test_a_draining_node_ends_when_idle_or_out_of_grace():
    def ends(**fields):
        return bool(plan_nodes(snapshot(head(), node("a", NodeState.DRAINING, **fields)), NOW).end)

    assert not ends(busy=True, drain_deadline=NOW + 1)
    assert ends(busy=True, drain_deadline=NOW)
    assert ends(busy=False, drain_deadline=NOW + 1)


def test_a_head_that_fails_takes_its_workers_along_and_is_replaced_once_gone():
    nodes = [head(NodeState.FAILED, error="killed"), node("a")]
    plan = plan_nodes(snapshot(*nodes, size=2), NOW)
    assert dict(plan.end) == {"head": "killed", "a": "the node's head is gone"}
    assert not plan.start_head
    assert plan_nodes(snapshot(size=2), NOW).start_head


def test_what_was_not_up_at_its_deadline_is_ended_and_so_is_another_life():
    late = node("late", NodeState.STARTING, start_deadline=NOW)
    assert dict(plan_nodes(snapshot(head(), late, size=2), NOW).end) == {
        "late": "the node was not ready at its start deadline"
    }
    stale = node("stale", epoch=0)
    assert dict(plan_nodes(snapshot(head(), stale, size=2), NOW).end)["stale"].startswith("the node was started before")


def test_a_pool_going_down_ends_everything():
    plan = plan_nodes(snapshot(head(), node("a"), of=pool(state=PoolState.STOPPING)), NOW)
    assert {end[0] for end in plan.end} == {"head", "a"}


def test_cooldown_holds_replacements_back_but_no_operation():
    cooling = pool(cooldown_until=NOW + 5)
    assert plan_nodes(snapshot(head(), size=2, of=cooling), NOW) == NodePlan()
    assert plan_nodes(snapshot(head(), size=2, of=cooling), NOW + 6).start_workers == 1
    assert plan_nodes(snapshot(head(), size=2, of=cooling, operations=[operation(2)]), NOW).start_workers == 1


def test_a_cooldown_begins_with_the_second_failure_and_doubles_up_to_a_limit():
    assert [cooldown(times) for times in (1, 2, 3)] == [0.0, REPLACE_COOLDOWN, 2 * REPLACE_COOLDOWN]
    assert cooldown(50) == cooldown(100_000) == REPLACE_COOLDOWN_MOST


def test_an_idle_pool_goes_down_and_one_that_works_does_not():
    idle = pool(spec={"name": "p", "idle_timeout": 60.0}, touched_at=NOW - 61)
    assert why_down(snapshot(head(), of=idle), NOW) == "it was idle for 60 s (idle_timeout)"
    assert why_down(snapshot(head(), of=idle), NOW - 1) is None
    for used in (snapshot(head(busy=True), of=idle), replace(snapshot(head(), of=idle), works=True)):
        assert why_down(used, NOW) is None


def verdicts(*nodes, size, **fields):
    return judge(snapshot(*nodes, size=size, operations=[operation(size, **fields)]), NOW)


def test_an_operation_succeeds_when_its_size_is_ready_and_nothing_is_left_over():
    assert verdicts(head(), node("a"), size=2) == [Verdict("op", OperationState.SUCCEEDED)]
    assert verdicts(head(), size=2) == []
    assert verdicts(head(), node("a", NodeState.ENDING), size=1) == []
    assert verdicts(head(), size=1) == [Verdict("op", OperationState.SUCCEEDED)]


@pytest.mark.parametrize(
    ("fields", "reason"), [({"deadline": NOW}, "1 of 3"), ({"failures": MAX_START_FAILURES}, "3 nodes")]
)
def test_past_its_deadline_or_failures_it_rolls_back(fields, reason):
    [verdict] = verdicts(head(), size=3, **fields)
    assert verdict.state is OperationState.ROLLED_BACK
    assert verdict.reason is not None
    assert verdict.reason.startswith(reason)


def test_with_its_minimum_reached_it_settles_at_what_it_has():
    [verdict] = verdicts(head(), node("a"), size=4, block_until_min_cluster_size=2, deadline=NOW)
    assert (verdict.state, verdict.settle_at) == (OperationState.SUCCEEDED, 2)
    [verdict] = verdicts(head(), size=4, block_until_min_cluster_size=2, deadline=NOW)
    assert verdict.state is OperationState.ROLLED_BACK


def test_a_lease_operation_needs_its_lease():
    asked = operation(2, kind=OperationKind.LEASE, lease_id="l2")
    assert judge(snapshot(head(), leases=[lease(2)], operations=[asked], set_by=None), NOW) == []
    [verdict] = judge(snapshot(head(), leases=[], operations=[asked], set_by=None), NOW)
    assert verdict.state is OperationState.SUPERSEDED


def test_a_smaller_demand_supersedes_and_no_other_does():
    older = operation(3, id="older")
    [verdict] = judge(snapshot(head(), size=2, operations=[older], set_by="newer"), NOW)
    assert verdict.state is OperationState.SUPERSEDED
    for size in (3, 4):
        assert judge(snapshot(head(), size=size, operations=[older], set_by="newer"), NOW) == []
    [verdict] = judge(snapshot(head(), operations=[older], of=pool(state=PoolState.STOPPING)), NOW)
    assert verdict.state is OperationState.SUPERSEDED


@pytest.mark.parametrize(
    ("claims", "base", "target"),
    [
        ("s3 s3", 1, 3),
        ("x3 x3", 1, 6),
        ("s2 s1 x3", 1, 5),
        ("x2", 4, 4),
        ("x2 x3?", 1, 2),
        ("x2?", None, 1),
        ("s3 x2", None, 5),
    ],
)
def test_exclusive_leases_add_up_beside_the_largest_shared_one(claims, base, target):
    assert wanted(leases(*claims.split(), size=base)) == target


@pytest.mark.parametrize(
    ("claims", "granted"),
    [
        ("x3 x3?", [2]),
        ("x4 x3?", []),
        ("x4 x3? x1?", []),  # the small one does not overtake the large one
        ("x4 x2? x1?", [2]),
        ("x3 x1? x2?", [2, 3]),
        ("s4 x3?", []),  # a shared lease is not shrunk for an exclusive one
        ("s4 x3? s2?", []),  # nor does a shared one overtake
        ("s2 s3 x3?", [3]),
        ("x3? x3? x1?", [1, 2]),
    ],
)
def test_waiting_leases_are_granted_in_the_order_of_their_requests(claims, granted):
    assert [one.queue_number for one in grantable(leases(*claims.split()))] == granted


def test_no_lease_is_granted_while_the_pool_goes_down():
    assert grantable(leases("x1?", of=pool(state=PoolState.STOPPING))) == []


@pytest.mark.parametrize(
    ("claims", "size", "allowed"),
    [
        ("x3 x2", 4, True),
        ("x3 x2", 5, False),
        ("x3 x2 x2?", 4, False),
        ("x3 x2 x2?", 2, True),
        ("s3 s4 x2?", 4, True),  # takes no more nodes than the other shared lease
        ("s3 s4 x3?", 5, False),
    ],
)
def test_a_granted_lease_grows_only_into_room_for_which_no_lease_waits(claims, size, allowed):
    state = leases(*claims.split())
    assert may_resize(state, state.leases[0], size) is allowed


@pytest.mark.parametrize(
    ("claims", "nodes"),
    [
        ("x3 x2", [3, 0]),
        ("s2 x3", [3, 1]),
        ("x1 s2 s3", [3, 2, 2]),
        ("x1 x2?", [3, 0]),
    ],
)
def test_nodes_count_for_earlier_leases_first(claims, nodes):
    state = leases(*claims.split())
    assert [nodes_for(state, one, 3) for one in state.leases] == nodes


def asked(number, size, **fields):
    return operation(size, id=f"op{number}", kind=OperationKind.LEASE, lease_id=f"l{number}", **fields)


def test_a_lease_operation_counts_no_node_of_an_earlier_exclusive_lease():
    operations = [asked(1, 2), asked(2, 2)]

    def ended(ready):
        nodes = [head(), *(node(f"n{number}") for number in range(ready - 1))]
        state = leases("x2", "x2", operations=operations)
        return [verdict.operation_id for verdict in judge(replace(state, nodes=tuple(nodes)), NOW)]

    assert [ended(ready) for ready in (1, 2, 3, 4)] == [[], ["op1"], ["op1"], ["op1", "op2"]]


def test_a_waiting_lease_is_rolled_back_at_its_deadline_with_its_place():
    nodes = [head(), *(node(f"n{number}") for number in range(5))]
    operations = [asked(2, 3, created_at=NOW), asked(3, 1, created_at=NOW, block_until_min_cluster_size=1)]
    state = replace(leases("x5", "x3?", "x1?", operations=operations), nodes=tuple(nodes))
    assert judge(state, NOW) == []
    said = [(verdict.state, verdict.reason) for verdict in judge(state, NOW + 720)]
    late = "at the deadline the lease was still waiting"
    advice = "5 of 6 nodes are taken: raise rollback_after_seconds=720, or let fewer runs wait at a time"
    assert said == [
        (OperationState.ROLLED_BACK, f"{late} as the next in the queue, {advice}"),
        (OperationState.ROLLED_BACK, f"{late} for 1 lease ahead, {advice}"),
    ]


def test_nodes_are_started_for_the_operation_that_needs_most_and_does_not_wait():
    operations = [asked(1, 3), asked(2, 2), asked(3, 4)]
    assert cause_of_starts(leases("x3", "x2", "x4?", operations=operations)).id == "op2"
    waits = leases("x3", "x4?", operations=[asked(2, 4)], of=pool(max_nodes=6, cooldown_until=NOW + 5))
    assert cause_of_starts(waits) is None
    assert plan_nodes(replace(waits, nodes=(head(),)), NOW) == NodePlan()  # a waiting lease ends no cooldown


def test_a_draining_node_counts_towards_the_limit():
    nodes = [head(), node("a"), node("old", NodeState.DRAINING, busy=True, drain_deadline=NOW + 9)]
    assert plan_nodes(snapshot(*nodes, size=3, of=pool(max_nodes=3)), NOW).start_workers == 0
    assert plan_nodes(snapshot(*nodes, size=3, of=pool(max_nodes=4)), NOW).start_workers == 1


def test_a_node_whose_end_is_announced_stays_until_its_replacement_is_ready():
    going = node("a", leaving_at=NOW + 100)
    assert plan_nodes(snapshot(head(), going, size=2), NOW) == NodePlan(start_workers=1)
    coming = node("b", NodeState.STARTING)
    assert plan_nodes(snapshot(head(), going, coming, size=2), NOW) == NodePlan()
    coming.state = NodeState.READY
    assert plan_nodes(snapshot(head(), going, coming, size=2), NOW).end == (("a", "the end of the node was announced"),)
    going.busy = True
    assert plan_nodes(snapshot(head(), going, coming, size=2), NOW) == NodePlan(drain=("a",))


def test_at_max_nodes_the_replacement_starts_when_the_announced_end_has_come():
    going, full = node("a", leaving_at=NOW + 100, busy=True), pool(max_nodes=2)
    assert plan_nodes(snapshot(head(), going, size=2, of=full), NOW + 99) == NodePlan()
    plan = plan_nodes(snapshot(head(), going, size=2, of=full), NOW + 100)
    assert plan == NodePlan(start_workers=1, end=(("a", "the end of the node was announced"),))


def test_a_shrinking_pool_needs_no_replacement_of_a_node_that_leaves():
    going = node("a", leaving_at=NOW + 100)
    assert plan_nodes(snapshot(head(), going, size=1), NOW).end == (("a", "the end of the node was announced"),)
