"""How many nodes leases and jobs have used, by the rows alone: resized, expired, killed, across a jump of the clock."""

from __future__ import annotations

import pytest

from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.pool.api import ComputePool
from shoal.pool.journal import commands, rows, usage
from shoal.pool.journal.advance import advance
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Job, JobState, Lease
from tests.support import clocks

NAME = "shared"
ORDER = Order("train-1", NAME, "test:a", {"question": "1"}, {}, None)


@pytest.fixture
def clock(monkeypatch):
    return clocks.installed(monkeypatch)


@pytest.fixture
def store(fresh_home, clock):
    store = Store()
    with store.transaction() as session:
        spec = PoolSpec.parse(f"local://{NAME}?max_nodes=6&idle_timeout=none")
        commands.begin_life(session, spec, owner=None, now=clock())
        commands.up(session, spec, holder="up", rollback_after=60, now=clock())
    return store


def lease(store: Store, clock: clocks.Clock, size: int, holder: str = "test:a", **options: object) -> Lease:
    with store.transaction() as session:
        settings = {"exclusive": False, "ttl": 900.0, "rollback_after": 720.0, "block_until_min_cluster_size": None}
        return commands.lease(session, NAME, size, holder=holder, now=clock(), **settings | options)[1]


def reconciled(store: Store, clock: clocks.Clock) -> list[str]:
    with store.transaction() as session:
        return advance(session, rows.load(session, NAME), clock()).decided


def used(store: Store, clock: clocks.Clock, **options: float) -> dict[str, tuple[int, int]]:
    """Node-seconds of leases and of jobs, by holder."""
    with store.reading() as session:
        found = usage.by_holder(session, NAME, clock(), **options)
    return {one.holder: (round(one.lease_node_seconds), round(one.job_node_seconds)) for one in found}


def test_a_lease_counts_from_its_grant_to_its_release_with_every_size(store, clock):
    lease(store, clock, 2)
    clock.pass_to(100)
    lease(store, clock, 4)
    clock.pass_to(110)
    assert used(store, clock) == {"test:a": (240, 0)}
    with store.transaction() as session:
        commands.release(session, NAME, "test:a", clock())
    clock.pass_to(500)
    assert used(store, clock) == {"test:a": (240, 0)}


def test_a_lease_that_waits_costs_nothing_until_the_reconciler_grants_it(store, clock):
    lease(store, clock, 6, exclusive=True)
    lease(store, clock, 3, holder="test:b", exclusive=True)
    clock.pass_to(100)
    with store.transaction() as session:
        commands.release(session, NAME, "test:a", clock())
    reconciled(store, clock)
    clock.pass_to(110)
    assert used(store, clock) == {"test:a": (600, 0), "test:b": (30, 0)}


def test_the_holder_of_a_lease_that_expires_is_charged_until_then(store, clock):
    lease(store, clock, 2, ttl=50)
    clock.pass_to(60)
    reconciled(store, clock)
    assert used(store, clock) == {"test:a": (100, 0)}


def test_a_jump_of_the_wall_clock_costs_nothing(store, clock):
    lease(store, clock, 2)
    clock.set_ahead(3600)
    clock.pass_to(10)
    assert used(store, clock) == {"test:a": (20, 0)}
    with store.transaction() as session:
        commands.down(session, NAME, clock())
    assert used(store, clock) == {"test:a": (20, 0)}


def test_only_the_part_of_a_use_after_a_time_counts(store, clock):
    began = clock()
    lease(store, clock, 2)
    clock.pass_to(100)
    assert used(store, clock, since=began + 75) == {"test:a": (50, 0)}
    with store.transaction() as session:
        commands.release(session, NAME, "test:a", clock())
    assert used(store, clock, since=began + 75) == {"test:a": (50, 0)}
    assert used(store, clock, since=began + 101) == {}


def test_a_job_counts_with_the_head_and_with_the_nodes_of_its_workers(store, clock):
    key = Key("train-1", 1)
    attempts.ask(store, ORDER, clock())
    assert attempts.start(store, key, {"pid": 1}, clock()) is not None
    clock.pass_to(30)
    with store.transaction() as session:  # the workers have run on 3 nodes for the last 20 seconds
        usage.job_uses(session, session.get_one(Job, ("train-1", 1)), 3, clock(), since_s=20)
    clock.pass_to(40)
    assert round(attempts.node_seconds(store, [key], clock())[key]) == 10 + 3 * 30
    attempts.end(store, key, JobState.FAILED, clock(), error="lost")
    clock.pass_to(50)
    assert used(store, clock) == {"test:a": (0, 100)}
    assert ComputePool(NAME, clock=clock).usage()[0].nodes == 0


def test_a_job_whose_driver_was_killed_counts_until_its_last_heartbeat(store, clock):
    key = Key("train-1", 1)
    attempts.ask(store, ORDER, clock())
    attempts.start(store, key, {"pid": 1}, clock())
    clock.pass_to(30)
    with store.transaction() as session:
        session.get_one(Job, ("train-1", 1)).heartbeat_at = clock()
    clock.pass_to(7200)
    attempts.end(store, key, JobState.FAILED, clock(), error="the driver was killed")
    assert used(store, clock) == {"test:a": (0, 30)}
