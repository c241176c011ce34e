"""A pool that belongs to a team: other teams can neither use nor change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal import history
from shoal.errors import InvalidArgumentError, NoPoolError, PoolDownError, TeamError
from shoal.pool import bound_host
from shoal.pool.api import ComputePool
from shoal.pool.holder import acting_for, may_change
from shoal.pool.journal import commands
from shoal.pool.spec import LeaseOptions, PoolSpec
from shoal.state import Store
from shoal.state.schema import Lease, Node, Operation, Pool, PoolState
from tests.support.job_store import add_node, add_pool

NAME = "retrain"
OURS = f"local://{NAME}?only_team=fraud"

REQUESTS: dict[str, Callable[[ComputePool], Any]] = {
    "up": lambda pool: pool.up(),
    "scale": lambda pool: pool.scale(2),
    "lease": lambda pool: pool.lease(1),
    "lease that brings up": lambda pool: pool.lease(1, bring_up=True),
    "alter": lambda pool: pool.alter(max_nodes=2),
    "retire": lambda pool: pool.retire_node(f"{NAME}-0"),
    "quota": lambda pool: pool.set_quota("ads", max_nodes=4),
    "down": lambda pool: pool.down(),
    "delete": lambda pool: pool.delete(),
}


@pytest.fixture
def store(fresh_home, monkeypatch) -> Store:
    """A store with a pool of team fraud that is up, and no reconciler."""
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    store = Store()
    add_pool(store)
    add_node(store, 1)
    reserve(store)
    return store


def reserve(store: Store, **columns: Any) -> None:
    with store.transaction() as session:
        pool = session.get_one(Pool, NAME)
        pool.spec = PoolSpec.parse(OURS).model_dump()
        for name, value in columns.items():
            setattr(pool, name, value)


def contents(store: Store) -> list[Any]:
    with store.reading() as session:
        return [
            [{name: value for name, value in vars(row).items() if name[0] != "_"} for row in session.query(table)]
            for table in (Pool, Lease, Node, Operation)
        ]


@pytest.mark.parametrize("asking", ["ads", None])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_requests_of_other_teams_are_refused_and_change_nothing(store, request_name, asking):
    before = contents(store)
    with pytest.raises(TeamError, match=f'pool "{NAME}" belongs to team "fraud", and this process acts for ') as error:
        REQUESTS[request_name](ComputePool(NAME, team=asking))
    acts = "no team" if asking is None else 'team "ads"'
    assert f"acts for {acts}: nothing was changed" in str(error.value)
    assert "set SHOAL_TEAM=fraud; an administrator sets SHOAL_TEAM='*'" in str(error.value)
    assert error.value.permanent
    assert contents(store) == before
    assert history.read() == []


def test_requests_of_the_own_team_and_of_an_administrator_are_accepted(store, monkeypatch):
    ComputePool(NAME, team="fraud").alter(max_nodes=3)
    monkeypatch.setenv("SHOAL_TEAM", "*")
    admin = ComputePool(NAME)
    admin.alter(max_nodes=2)
    assert admin.team is None  # its leases count to no team's quota
    with acting_for("fraud"):
        ComputePool(NAME).set_quota("ads", max_nodes=1)
    with acting_for(None), pytest.raises(TeamError):
        ComputePool(NAME, team="ads").set_quota("ads", max_nodes=1)


def test_a_pool_that_is_down_cannot_be_taken_over_by_a_uri(store):
    reserve(store, state=PoolState.DOWN)
    for source in (f"local://{NAME}", f"local://{NAME}?only_team=ads"):
        with pytest.raises(TeamError, match='belongs to team "fraud"'):
            ComputePool(source, team="ads").up()
    with pytest.raises(TeamError, match='pool "retrain" belongs to team "ads", and this process acts for team "fraud"'):
        ComputePool(f"local://{NAME}?only_team=ads", team="fraud").up()
    with pytest.raises(TeamError, match='pool "new" belongs to team "fraud", and this process acts for no team'):
        ComputePool("local://new?only_team=fraud").up()


def test_a_pool_without_a_team_is_open_to_all(store):
    with store.transaction() as session:
        session.get_one(Pool, NAME).spec = PoolSpec(name=NAME).model_dump(exclude={"only_team"})  # of an older shoal
    for team in (None, "fraud", "ads"):
        ComputePool(NAME, team=team).alter(max_nodes=3)


@pytest.mark.parametrize(("asking", "is_reserved"), [("ads", True), (None, True), ("ads", False)])
def test_a_request_of_another_team_is_not_withdrawn(store, asking, is_reserved):
    fraud = ComputePool(NAME, holder="test:a", team="fraud")
    fraud.lease(2, is_async=True)
    if not is_reserved:
        with store.transaction() as session:
            session.get_one(Pool, NAME).spec = PoolSpec(name=NAME).model_dump()
    before = contents(store)
    with pytest.raises(TeamError, match='belongs to team "fraud", and this process acts for '):
        ComputePool(NAME, holder="test:b", team=asking).withdraw(fraud.operation_id, "not mine")
    assert contents(store) == before
    # A triggerer acts for the run that has made the request, and has no team.
    assert ComputePool(NAME, holder="test:a").withdraw(fraud.operation_id, "the task was cleared")


@pytest.mark.parametrize(("asking", "is_refused"), [("ads", True), (None, False), ("fraud", False), ("*", False)])
def test_a_lease_of_another_team_is_not_released(store, asking, is_refused):
    options = LeaseOptions.for_size({}, 1)
    with store.transaction() as session:
        commands.lease(
            session, NAME, 1, exclusive=False, holder="test:a", ttl=60, options=options, now=0.0, team="fraud"
        )
    if is_refused:
        with store.transaction() as session, pytest.raises(TeamError, match="the lease of test:a on pool"):
            commands.release(session, NAME, "test:a", 0.0, team=asking)
    with store.transaction() as session:
        released = [] if is_refused else commands.release(session, NAME, "test:a", 0.0, team=asking)
    with store.reading() as session:
        assert session.query(Lease).count() == (1 if is_refused else 0)
    assert released == ([] if is_refused else ["test:a"])


def test_nobody_has_a_team(store):
    assert may_change(None, None, is_reserved=True)
    with store.transaction() as session:
        session.get_one(Pool, NAME).spec = PoolSpec(name=NAME).model_dump()
        session.get_one(Pool, NAME).state = PoolState.DOWN
    with pytest.raises(PoolDownError):  # it got as far as today
        ComputePool(NAME).scale(2)


def test_the_only_pool_that_a_team_may_use_needs_no_name(store, monkeypatch):
    with store.transaction() as session:
        row = session.get_one(Pool, NAME)
        columns = {column.name: getattr(row, column.name) for column in Pool.__table__.columns}
        spec = PoolSpec.parse("local://theirs?only_team=ads").model_dump()
        session.add(Pool(**{**columns, "name": "theirs", "spec": spec}))
    bound_host.record(PoolSpec(name="theirs"))
    assert ComputePool(team="fraud").name == NAME
    monkeypatch.setenv("SHOAL_TEAM", "ads")
    assert ComputePool().name == "theirs"
    with pytest.raises(NoPoolError, match="several are up"):
        ComputePool(team="*")


@pytest.mark.parametrize("team", ["", "*", "x" * 256])
def test_the_name_of_the_team_is_checked(team):
    with pytest.raises(InvalidArgumentError, match="only_team"):
        PoolSpec.parse({"name": NAME, "only_team": team})
