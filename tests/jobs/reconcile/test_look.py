"""Looks at pools and jobs wait for no writer, and write nothing where nothing has changed."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import jobs
from shoal.cli.doctor_checks import leftovers
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.reconcile.decide import Silence, View
from shoal.jobs.reconcile.look import Target, address, view
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.backends.interface import Seen
from shoal.pool.journal import rows
from shoal.pool.journal.advance import advance, is_due, record_seen
from shoal.pool.reconciling import Changes, reconcile
from shoal.pool.spec import PoolSpec
from shoal.state import Store, databases, stamps
from shoal.state.schema import (
    Demand,
    JobState,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationKind,
    OperationState,
    Pool,
    PoolState,
)
from tests.jobs.journal.test_attempts import FIRST, ORDER
from tests.support.fake_ray_head import FakeJob
from tests.support.job_store import POOL

NOW = 1000.0
TIMES = st.sampled_from([0.0, 500.0, 990.0, NOW, 1010.0, 2000.0])


def test_looks_wait_for_no_writer(either_store, store, head, monkeypatch):
    """While another writes, all that only reads goes on; it waited, and failed after 30 s."""
    monkeypatch.setattr(databases, "_BEGIN_WRITING", databases._BEGIN_WRITING.replace("120s", "1s"))
    job = attempts.ask(store, replace(ORDER, endpoint=address(head.endpoint)), 0.0)
    pool = ComputePool(POOL, store=store)
    target = Target(store, FIRST, POOL, find_endpoint=lambda _: head.endpoint, clock=lambda: 1.0)
    handle = JobHandle(target, job)
    with store.transaction() as session:
        session.get(Pool, POOL)
        assert attempts.load(store, FIRST).attempt == attempts.latest(store, "job").attempt == 1
        assert [found.job_id for found in jobs.list_jobs()] == ["job"]
        assert handle.status().state is JobState.PENDING
        assert view(replace(target, find_endpoint=lambda _: pool.endpoint()), job).silence is Silence.NO_ANSWER
        assert leftovers(store) == []
        assert [pool.name for pool in list_pools(store)] == [POOL]


def test_a_pool_that_is_as_it_should_be_is_reconciled_without_a_lock(either_store, store, monkeypatch):
    monkeypatch.setattr(databases, "_BEGIN_WRITING", databases._BEGIN_WRITING.replace("120s", "1s"))
    with store.transaction() as session:
        session.add(Demand(pool=POOL, size=1, operation_id=None, set_at=0.0))
        session.add(node(NodeState.PLANNED, spawned_at=math.inf, start_deadline=math.inf))
        pool = session.get_one(Pool, POOL)
        pool.touched_at, pool.seen_at = math.inf, stamps.shared_now(session, NOW)
    with store.transaction() as session:
        session.get(Pool, POOL)
        assert reconcile(store, POOL, clock=lambda: NOW) == Changes()


def test_a_job_that_has_ended_is_not_asked_about(store, head):
    attempts.end(store, Key(attempts.ask(store, ORDER, 0.0).id, 1), JobState.FAILED, 1.0, error="why")
    target = Target(store, FIRST, POOL, find_endpoint=lambda _: head.endpoint)
    JobHandle(target, attempts.load(store, FIRST)).status()
    assert attempts.load(store, FIRST).last_polled_at == 0.0


def node(state: NodeState, **fields) -> Node:
    return Node(
        **{
            "id": "a", "pool": POOL, "name": f"{POOL}-0", "is_head": True, "state": state, "epoch": 1, "cpus": 1,
            "gpus": 0, "busy": False, "start_deadline": NOW, "created_at": 0.0,
        }
        | fields
    )  # fmt: skip


@st.composite
def pool_rows(draw) -> list[object]:
    """A pool with some demand, lease, operation and nodes, of any age and in any state."""
    spec = PoolSpec(name=POOL)
    pool = Pool(
        name=POOL, spec=spec.model_dump(), state=draw(st.sampled_from(PoolState)), host="", min_nodes=1, max_nodes=4,
        epoch=1, next_node=9, created_at=0.0, touched_at=draw(TIMES), start_failures=draw(st.integers(0, 2)),
        cooldown_until=draw(st.none() | TIMES),
    )  # fmt: skip
    found: list[object] = [pool]
    if draw(st.booleans()):
        found.append(Demand(pool=POOL, size=draw(st.integers(1, 3)), operation_id="o", set_at=0.0))
    if draw(st.booleans()):
        found.append(
            Lease(id="l", pool=POOL, holder="h", size=2, epoch=1, ttl=60.0, expires_at=draw(TIMES), created_at=0.0)
        )
    if draw(st.booleans()):
        found.append(
            Operation(
                id="o", pool=POOL, kind=draw(st.sampled_from(OperationKind)), lease_id="l", holder="h", size=2,
                state=draw(st.sampled_from(OperationState)), deadline=draw(TIMES), failures=draw(st.integers(0, 3)),
                node_errors={}, created_at=0.0, block_until_min_cluster_size=draw(st.none() | st.just(1)),
            )
        )  # fmt: skip
    found += [
        node(
            draw(st.sampled_from(NodeState)), id=f"n{number}", name=f"{POOL}-{number}", is_head=number == 0,
            head_id=None if number == 0 else "n0", epoch=draw(st.sampled_from([1, 1, 1, 0])),
            busy=draw(st.booleans()), start_deadline=draw(TIMES), spawned_at=draw(st.none() | TIMES),
            drain_deadline=draw(TIMES), created_at=draw(TIMES), operation_id=draw(st.sampled_from([None, "o"])),
        )
        for number in range(draw(st.integers(0, 3)))
    ]  # fmt: skip
    return found


@pytest.fixture
def empty(store: Store) -> Store:
    with store.transaction() as session:
        session.delete(session.get_one(Pool, POOL))
    return store


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=pool_rows())
def test_where_nothing_is_due_reconciling_changes_nothing(empty, found):
    """The look without a lock leaves nothing undone that a reconciliation would do."""

    class Undone(Exception):
        pass

    with suppress(Undone), empty.transaction() as session:
        session.add(found[0])  # the others point to it
        session.flush()
        session.add_all(found)
        session.flush()
        snapshot = rows.load(session, POOL)
        due = is_due(snapshot, [], Seen(), NOW, shared_now=NOW)
        record_seen(snapshot, [], Seen())
        intents = advance(session, snapshot, NOW)
        changed = bool(session.new or session.deleted or any(session.is_modified(row) for row in session.dirty))
        assert due or not (changed or intents.start or intents.end or intents.decided)
        raise Undone


def test_a_running_job_that_the_head_does_not_know_once_is_looked_for_again(store, head):
    attempts.ask(store, replace(ORDER, endpoint=address(head.endpoint)), 0.0)
    job = attempts.start(store, FIRST, ProcessId.mine().to_json(), 0.0)
    pauses = []

    def seen(back: bool) -> View:
        def sleep(seconds: float, _: object) -> None:
            pauses.append(seconds)
            if back:
                head.jobs[FIRST.submission_id] = FakeJob("driver", {}, status="RUNNING")

        return view(Target(store, FIRST, POOL, find_endpoint=lambda _: head.endpoint, sleep=sleep), job)

    assert seen(back=False) == View()
    assert seen(back=True).ray_job is not None
    assert pauses == [5.0, 5.0]
