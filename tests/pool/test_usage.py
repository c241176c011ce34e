"""How many nodes leases and jobs have used, by the rows alone: resized, expired, killed, across a jump of the clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal import history
from shoal.errors import BudgetError, FencedError, InvalidArgumentError
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.pool.api import ComputePool
from shoal.pool.journal import commands, rows, usage
from shoal.pool.journal.advance import advance
from shoal.pool.spec import LeaseOptions, PoolSpec
from shoal.state import Store
from shoal.state.schema import Job, JobState, Lease, Node, NodeState

NAME = "shared"
ORDER = Order("train-1", NAME, "test:a", {"fingerprint": "1"}, {}, None)


class Clock:
    """A wall clock and a monotonic clock that stand still."""

    def __init__(self) -> None:
        self._passed = self._jumped = 0.0

    def __call__(self) -> float:
        return 1e9 + self._passed + self._jumped

    def monotonic(self) -> float:
        return self._passed

    def pass_to(self, seconds: float) -> None:
        """Have so many seconds passed since the test began."""
        self._passed = seconds

    def set_ahead(self, seconds: float) -> None:
        """Set the wall clock ahead, as after a suspend."""
        self._jumped = seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("shoal.state.stamps.wall", clock)
    monkeypatch.setattr("shoal.state.stamps.monotonic", clock.monotonic)
    return clock


@pytest.fixture
def store(fresh_home, clock):
    store = Store()
    with store.transaction() as session:
        spec = PoolSpec.parse(f"local://{NAME}?max_nodes=6&idle_timeout=none")
        commands.begin_life(session, spec, owner=None, now=clock())
        commands.up(session, spec, holder="up", rollback_after=1e9, now=clock())
    return store


def lease(
    store: Store,
    clock: Clock,
    size: int,
    holder: str = "test:a",
    *,
    exclusive: bool = False,
    ttl: float = 1e6,
    team: str | None = None,
    ancestors: dict[str, bool] | None = None,
    **options: float,
) -> Lease:
    checked = LeaseOptions.for_size({"rollback_after_seconds": 1e9} | options, size)
    with store.transaction() as session:
        return commands.lease(
            session, NAME, size, holder=holder, exclusive=exclusive, ttl=ttl, options=checked, now=clock(), team=team,
            ancestors=ancestors,
        )[1]  # fmt: skip


def release(store: Store, clock: Clock, holder: str = "test:a") -> None:
    with store.transaction() as session:
        commands.release(session, NAME, holder, clock())


def add_job(store: Store, name: str, holder: str, state: JobState = JobState.RUNNING, **columns: Any) -> None:
    with store.transaction() as session:
        session.add(
            Job(
                id=name, attempt=1, pool=NAME, holder=holder, spec={}, state=state, endpoint={}, last_polled_at=0.0,
                created_at=0.0, **columns,
            )
        )  # fmt: skip


def heartbeat(store: Store, clock: Clock) -> None:
    with store.transaction() as session:
        for job in session.query(Job).filter(Job.state == JobState.RUNNING):
            job.heartbeat_at = clock()


def reconciled(store: Store, clock: Clock) -> list[str]:
    """Run one reconcile round, after which all nodes are ready. Return what it has decided about leases."""
    with store.transaction() as session:
        decided = advance(session, rows.load(session, NAME), clock()).decided
    with store.transaction() as session:
        for node in session.query(Node).filter(Node.state == NodeState.PLANNED):
            node.state, node.endpoint = NodeState.READY, {"ray_node_id": node.id}
    return [sentence for sentence in decided if not sentence.startswith(("up to", "lease to"))]


def used(store: Store, clock: Clock, **options: float) -> dict[str, tuple[int, int]]:
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
    release(store, clock)
    clock.pass_to(500)
    assert used(store, clock) == {"test:a": (240, 0)}


def test_a_lease_that_waits_costs_nothing_until_the_reconciler_grants_it(store, clock):
    lease(store, clock, 6, exclusive=True)
    lease(store, clock, 3, holder="test:b", exclusive=True)
    clock.pass_to(100)
    release(store, clock)
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
    release(store, clock)
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
    heartbeat(store, clock)
    clock.pass_to(7200)
    attempts.end(store, key, JobState.FAILED, clock(), error="the driver was killed")
    assert used(store, clock) == {"test:a": (0, 30)}


def test_a_lease_and_its_jobs_end_after_its_lifetime_though_its_holder_renews_it(store, clock):
    mine = lease(store, clock, 2, max_lifetime=100)
    lease(store, clock, 2, holder="test:b")
    add_job(store, "waits", "test:a", JobState.PENDING)
    add_job(store, "another", "test:b")
    with store.transaction() as session:
        waits = session.get_one(Job, ("waits", 1))
        waits.driver_key, waits.sealed_credentials = "key", "sealed"
    clock.pass_to(99)
    assert reconciled(store, clock) == []
    clock.pass_to(100)
    why = 'the lease of test:a on pool "shared" was ended after max_lifetime=100 s'
    assert reconciled(store, clock)[0].startswith(why)
    ended = attempts.load(store, Key("waits", 1))
    assert (ended.state, ended.error_is_permanent) == (JobState.FAILED, True)
    assert ended.error.startswith(why)
    assert (ended.driver_key, ended.sealed_credentials) == (None, None)
    assert attempts.load(store, Key("another", 1)).state is JobState.RUNNING
    with store.transaction() as session, pytest.raises(FencedError, match="after max_lifetime=100 s: set a longer"):
        commands.renew(session, mine.id, mine.epoch, clock())
    assert [one.holder for one in ComputePool(NAME, clock=clock).describe().leases] == ["test:b"]


def test_the_time_in_the_queue_does_not_count_for_the_lifetime(store, clock):
    lease(store, clock, 6, exclusive=True)
    lease(store, clock, 6, holder="test:b", exclusive=True, max_lifetime=100)
    clock.pass_to(500)
    release(store, clock)
    assert reconciled(store, clock) == ["the lease of test:b was granted, 6 nodes"]
    clock.pass_to(599)
    assert reconciled(store, clock) == []


def test_a_run_that_has_used_its_budget_is_ended_and_gets_no_further_lease(store, clock):
    lease(store, clock, 4, budget_node_hours=2)
    clock.pass_to(1700)
    release(store, clock)
    lease(store, clock, 2, budget_node_hours=2)
    clock.pass_to(1900)
    assert "test:a has used 2 node-hours" in reconciled(store, clock)[0]
    with pytest.raises(
        BudgetError, match=r'used 2 node-hours on pool "shared", so budget_node_hours=2 is used up: raise'
    ):
        lease(store, clock, 1, budget_node_hours=2)
    lease(store, clock, 1, budget_node_hours=3)


def test_the_blocks_of_a_flow_run_use_up_the_budget_of_the_run(store, clock):
    lease(store, clock, 4, "prefect:run/1", budget_node_hours=2)
    clock.pass_to(1700)
    release(store, clock, "prefect:run/1")
    lease(store, clock, 2, "prefect:run/2", budget_node_hours=2)
    clock.pass_to(1900)
    assert "prefect:run has used 2 node-hours" in reconciled(store, clock)[0]
    with pytest.raises(BudgetError, match="prefect:run has used 2 node-hours"):
        lease(store, clock, 1, "prefect:run/3", budget_node_hours=2)
    assert used(store, clock) == {"prefect:run": (7200, 0)}


def test_the_lifetime_of_a_block_ends_only_its_own_jobs(store, clock):
    lease(store, clock, 2, "prefect:run/1", max_lifetime=100)
    add_job(store, "inside", "prefect:run", ancestors={"prefect:run/1": True})
    add_job(store, "beside", "prefect:run", ancestors={"prefect:run/2": True})
    clock.pass_to(100)
    reconciled(store, clock)
    states = {name: attempts.load(store, Key(name, 1)).state for name in ("inside", "beside")}
    assert states == {"inside": JobState.FAILED, "beside": JobState.RUNNING}


def test_a_lease_inside_a_block_does_not_wait_for_leases_that_wait_for_the_block(store, clock):
    lease(store, clock, 4, "prefect:run/1", exclusive=True)
    lease(store, clock, 3, "test:b", exclusive=True)
    lease(store, clock, 2, "prefect:run/2", ancestors={"prefect:run/1": True})
    behind = "waiting as the next in the queue, 6 of 6 nodes are taken"
    assert waits(clock) == {"prefect:run/1": None, "test:b": behind, "prefect:run/2": None}
    assert ComputePool(NAME, holder="prefect:child", ancestors={"prefect:run/1": True}, clock=clock).renew()
    assert not ComputePool(NAME, holder="prefect:child", ancestors={"prefect:run/1": False}, clock=clock).renew()
    with pytest.raises(InvalidArgumentError, match=r"\(4 of prefect:run/1\) needs 7 nodes, above MAX_NODES=6"):
        lease(store, clock, 3, "prefect:run/3", exclusive=True, ancestors={"prefect:run/1": True})


def test_the_holder_of_a_python_process_may_come_again_for_other_work(store, clock):
    for begins in (0, 1000):
        clock.pass_to(begins)
        lease(store, clock, 4, "python:me@host/1", budget_node_hours=1)
        clock.pass_to(begins + 800)
        assert reconciled(store, clock) == []
        release(store, clock, "python:me@host/1")


def test_jobs_do_not_count_for_the_budget_of_a_python_process_that_has_no_lease_yet(store, clock):
    key = Key("train-1", 1)
    attempts.ask(store, ORDER, clock())
    attempts.start(store, key, {"pid": 1}, clock())
    clock.pass_to(7200)
    heartbeat(store, clock)
    attempts.end(store, key, JobState.SUCCEEDED, clock())
    assert used(store, clock) == {"test:a": (0, 7200)}
    lease(store, clock, 1, "python:me@host/1", budget_node_hours=1)


def test_a_lease_that_could_exceed_its_budget_in_its_lifetime_is_refused(store, clock):
    with pytest.raises(InvalidArgumentError, match=r"8 node-hours, above budget_node_hours=6: set .* at most 5400,"):
        lease(store, clock, 4, max_lifetime=7200, budget_node_hours=6)


def test_the_budget_of_a_job_counts_its_attempts_since_the_last_success(store, clock):
    keys = [Key("train-1", attempt) for attempt in (1, 2, 3)]
    ends = (JobState.SUCCEEDED, JobState.FAILED)
    for key, end in zip(keys, ends, strict=False):
        attempts.ask(store, replace(ORDER, spec={"fingerprint": str(key.attempt)}), clock())
        attempts.start(store, key, {"pid": 1}, clock())
        clock.pass_to(3600 * key.attempt)
        heartbeat(store, clock)
        attempts.end(store, key, end, clock(), error=None if end is JobState.SUCCEEDED else "lost")
    attempts.check_budget(store, "train-1", 1.5, clock())
    with pytest.raises(BudgetError, match=r"the job has used 1 node-hours, but run_config\.budget_node_hours=1:"):
        attempts.check_budget(store, "train-1", 1, clock())


def waits(clock: Clock) -> dict[str, str | None]:
    """Holders of the leases, with the text about their place in the queue."""
    status = ComputePool(NAME, clock=clock).describe()
    return {one.holder: status.queue_note(one.holder) for one in status.leases}


@pytest.fixture
def quota(store, clock, monkeypatch):
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    return ComputePool(NAME, store=store, clock=clock).set_quota


def test_a_lease_above_the_nodes_of_its_team_waits_and_holds_back_its_team_only(store, clock, quota):
    quota("fraud", max_nodes=3)
    lease(store, clock, 2, "test:a", exclusive=True, team="fraud")
    lease(store, clock, 2, "test:b", exclusive=True, team="fraud")
    lease(store, clock, 1, "test:c", exclusive=True, team="fraud")
    lease(store, clock, 2, "test:d", exclusive=True, team="ads")
    note = 'waiting for the quota of team "fraud", 2 of 3 nodes are taken'
    behind = "waiting for 1 lease ahead, 4 of 6 nodes are taken"
    assert waits(clock) == {"test:a": None, "test:b": note, "test:c": behind, "test:d": None}
    release(store, clock, "test:a")
    b, c = "the lease of test:b was granted, 2 nodes", "the lease of test:c was granted, 1 nodes"
    assert reconciled(store, clock) == [b, c]
    assert set(waits(clock).values()) == {None}


def test_a_lease_that_is_requested_again_for_another_team_counts_to_it_from_then_on(store, clock):
    lease(store, clock, 2, team="fraud")
    clock.pass_to(100)
    lease(store, clock, 2, team="ads")
    clock.pass_to(150)
    with store.reading() as session:
        of_teams = {team: usage.of_team(session, NAME, team, clock(), since=0.0) for team in ("fraud", "ads")}
    assert of_teams == {"fraud": 200, "ads": 100}


def test_a_lease_that_never_fits_into_its_teams_quota_is_refused(store, clock, quota):
    quota("fraud", max_nodes=3)
    with pytest.raises(
        BudgetError, match=r'a lease of 4 nodes is above the quota of 3 nodes of team "fraud": use less'
    ):
        lease(store, clock, 4, team="fraud")
    lease(store, clock, 2, team="fraud")
    with pytest.raises(BudgetError, match="a lease of 4 nodes is above the quota"):
        lease(store, clock, 4, team="fraud")
    lease(store, clock, 6, "test:b")
    quota("fraud")
    lease(store, clock, 4, team="fraud")
    assert [(one.kind, one.detail) for one in history.read(pool=NAME)] == [
        ("altered", "quota of team fraud: 3 nodes -> no limit"),
        ("altered", "quota of team fraud: no limit -> 3 nodes"),
    ]


def test_a_team_that_has_used_its_node_hours_is_refused_until_they_are_30_days_old(store, clock, quota):
    quota("fraud", node_hours=4)
    lease(store, clock, 2, team="fraud")
    clock.pass_to(3600)
    with pytest.raises(BudgetError, match=r'team "fraud" has used 2 of 4 node-hours .* this lease could use 3 more'):
        lease(store, clock, 3, "test:b", team="fraud", max_lifetime=3600)
    clock.pass_to(7200)
    release(store, clock)
    with pytest.raises(BudgetError, match="has used 4 of 4 node-hours on pool"):
        lease(store, clock, 1, team="fraud")
    lease(store, clock, 1, "test:c", team="ads")
    clock.pass_to(31 * 24 * 3600)
    lease(store, clock, 1, team="fraud")
