"""Any order of requests, releases, deaths and reconciling: leases add up, in order, and none is shrunk by another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import eq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, ScaleError
from shoal.pool import scaling_plan
from shoal.pool.journal import commands, rows
from shoal.pool.journal.advance import advance, withdraw
from shoal.pool.scaling_plan import wanted
from shoal.pool.spec import LeaseOptions, PoolSpec
from shoal.state.schema import Base, Node, NodeState, Operation, OperationState, Usage

MAX_NODES = 6

holders = st.sampled_from("abcd")
sizes = st.integers(1, MAX_NODES)


class Clock:
    """Both clocks of a host; they stand still between the rules."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class Leasing(RuleBasedStateMachine):
    """A pool in a database in memory. Its nodes are rows that this machine changes."""

    clock = Clock()

    def __init__(self) -> None:
        super().__init__()
        self.engine = create_engine("sqlite://")
        Base.metadata.create_all(self.engine)
        self.known: dict[str, tuple[str, int, bool]] = {}
        self.own: set[str] = set()
        """Leases that may lose nodes in this step: those of the holder that acts, and those whose time is up."""
        with self.writing() as session:
            spec = PoolSpec.parse(f"local://p?max_nodes={MAX_NODES}&idle_timeout=none")
            commands.begin_life(session, spec, owner=None, now=self.clock())
            commands.up(session, spec, holder="up", rollback_after=60, now=self.clock())
        self.reconcile()
        self.all_nodes_come()
        self.reconcile()

    def teardown(self) -> None:
        self.engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    @initialize(claims=st.tuples(sizes, sizes, sizes))
    def three_come_at_once(self, claims: tuple[int, int, int]) -> None:
        for holder, size in zip("abc", claims, strict=True):
            self.request(holder, size, exclusive=True, deadline=200.0, minimum=None)

    @rule(
        holder=holders,
        size=sizes,
        exclusive=st.booleans(),
        deadline=st.sampled_from([20.0, 200.0]),
        minimum=st.sampled_from([None, 1]),
    )
    def request(self, holder: str, size: int, exclusive: bool, deadline: float, minimum: int | None) -> None:
        with self.writing() as session:
            snapshot = rows.load(session, "p")
            max_nodes = snapshot.pool.max_nodes
            before = {one.holder: one for one in snapshot.leases}
            other_kind = holder in before and before[holder].exclusive is not exclusive
            size_before = before[holder].size if holder in before and not before[holder].waiting else None
            try:
                _, lease = commands.lease(
                    session, "p", size, exclusive=exclusive, holder=holder, ttl=60.0, now=self.clock(),
                    options=LeaseOptions(rollback_after_seconds=deadline, block_until_min_cluster_size=minimum),
                )  # fmt: skip
            except InvalidArgumentError:
                assert other_kind or size > max_nodes
                session.rollback()
                return
            except ScaleError:
                assert size_before is not None and size > size_before
                session.rollback()
                return
            assert not other_kind
            assert lease.size == size
            self.own = {lease.id}

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        with self.writing() as session:
            self.own = {one.id for one in rows.load(session, "p").leases if one.holder == holder}
            commands.release(session, "p", holder, self.clock())

    @rule(holder=holders)
    def renew(self, holder: str) -> None:
        with self.writing() as session:
            commands.renew_held(session, "p", {holder}, self.clock())

    @rule(number=st.integers(0, 3))
    def give_up(self, number: int) -> None:
        with self.writing() as session:
            still_open = [row for row in self.operations(session) if row.state is OperationState.OPEN and row.lease_id]
            if number < len(still_open):
                self.own = {str(still_open[number].lease_id)}
                withdraw(session, still_open[number].id, "given up", self.clock())

    @rule(size=sizes)
    def scale(self, size: int) -> None:
        with self.writing() as session:
            if size <= rows.load(session, "p").pool.max_nodes:
                options = LeaseOptions(rollback_after_seconds=60)
                commands.scale(session, "p", size, holder="s", options=options, now=self.clock())

    @rule(size=st.integers(MAX_NODES - 1, MAX_NODES + 2))
    def alter(self, size: int) -> None:
        with self.writing() as session:
            snapshot = rows.load(session, "p")
            assert snapshot.demand
            claims = [snapshot.demand.size, scaling_plan.leased(snapshot), *(one.size for one in snapshot.leases)]
            if size >= max(claims):
                commands.alter(session, "p", min_nodes=None, max_nodes=size, now=self.clock())
                return
            with pytest.raises(InvalidArgumentError, match="is below"):
                commands.alter(session, "p", min_nodes=None, max_nodes=size, now=self.clock())
            session.rollback()

    @rule(seconds=st.sampled_from([1.0, 15.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(number=st.integers(0, MAX_NODES), state=st.sampled_from([NodeState.READY, NodeState.FAILED]))
    def a_node_changes(self, number: int, state: NodeState) -> None:
        with self.writing() as session:
            nodes = [node for node in rows.load(session, "p").nodes if node.state is not NodeState.ENDING]
            if number < len(nodes):
                nodes[number].state, nodes[number].endpoint = state, {"ray_node_id": nodes[number].id}

    @rule()
    def all_nodes_come(self) -> None:
        with self.writing() as session:
            for node in rows.load(session, "p").nodes:
                if node.state is NodeState.PLANNED:
                    node.state, node.endpoint = NodeState.READY, {"ray_node_id": node.id}

    @rule()
    def reconcile(self) -> None:
        with self.writing() as session:
            snapshot = rows.load(session, "p")
            still_open = [row for row in snapshot.operations if row.state is OperationState.OPEN]
            said = advance(session, snapshot, self.clock()).decided
            expired = {one.id for one in snapshot.leases if f"the lease of {one.holder} expired" in said}
            failed = {str(row.lease_id) for row in still_open if row.error is not None}
            self.own = expired | failed
            session.flush()
            for node in session.query(Node).filter(Node.state == NodeState.ENDING):
                session.delete(node)
            session.flush()
            after = rows.load(session, "p")
            assert scaling_plan.grantable(after) == []
            there = [node for node in after.nodes if node.state is not NodeState.FAILED]
            assert len(there) <= after.pool.max_nodes

    @staticmethod
    def operations(session: Session) -> list[Operation]:
        return list(rows.load(session, "p").operations)

    @invariant()
    def leases_add_up_in_order(self) -> None:
        with Session(self.engine) as session:
            snapshot = rows.load(session, "p", lock=False)
            granted = [one for one in snapshot.leases if not one.waiting]
            exclusive = sum(one.size for one in granted if one.exclusive)
            shared = max((one.size for one in granted if not one.exclusive), default=0)
            assert exclusive + shared <= snapshot.pool.max_nodes
            assert wanted(snapshot) >= exclusive + shared

            least = max(snapshot.pool.min_nodes, snapshot.demand.size if snapshot.demand else 0)
            for one in granted:
                kept = scaling_plan.kept_for(snapshot.leases, least, partial(eq, one))
                alone = wanted(replace(snapshot, leases=(one,)))
                assert kept == (alone if len(granted) > 1 else None), "a job counts on nodes that would end"

            first_waiting = min((one.queue_number for one in scaling_plan.queue(snapshot)), default=None)
            for one in granted:
                newly = one.id not in self.known or self.known[one.id][2]
                if newly and first_waiting is not None:
                    assert one.queue_number < first_waiting

            now = {one.id: one for one in snapshot.leases}
            for lease_id, (_, size, was_waiting) in self.known.items():
                if lease_id in self.own or was_waiting:
                    continue
                assert lease_id in now, "a lease was removed by another one's request"
                assert not now[lease_id].waiting and now[lease_id].size >= size

            still_open = {row.lease_id for row in snapshot.operations if row.state is OperationState.OPEN}
            for one in scaling_plan.queue(snapshot):
                assert one.id in still_open, "a lease waits without a deadline"
            uses = session.query(Usage).filter(Usage.ended_at.is_(None))
            assert {(row.lease_id, row.nodes) for row in uses} == {(one.id, one.size) for one in granted}
            self.known = {one.id: (one.holder, one.size, one.waiting) for one in snapshot.leases}
            self.own = set()


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.long)])
def test_leases_add_up_in_any_order_of_events(monkeypatch, examples):
    monkeypatch.setattr("shoal.state.stamps.wall", Leasing.clock)
    monkeypatch.setattr("shoal.state.stamps.monotonic", Leasing.clock)
    run_state_machine_as_test(Leasing, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
