"""A process that was paused takes its own pause for the silence of no other process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from shoal import own_pauses, reconciler
from shoal.jobs.driver import heartbeats as driver_heartbeats
from shoal.jobs.reconcile import rounds
from shoal.jobs.reconcile.decide import Silence, View
from shoal.jobs.timeouts import HEAD_PATIENCE_S, JOB_SILENT_AFTER
from shoal.own_pauses import PauseClock
from shoal.pool.journal import advance, rows
from shoal.pool.timeouts import LEASE_TTL
from shoal.state import stamps
from shoal.state.schema import Lease, Pool
from shoal.training.gang import connection
from shoal.training.gang.connection import WorkerConnections
from shoal.training.timeouts import WORKER_SILENCE_S

GAP_S = 5.0
PAUSE_S = 130.0


class Machine:
    """A clock that the test moves, and what all judges of this process read from it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = PauseClock(lambda: self.now)

    def run(self, seconds: float) -> None:
        """Let time pass in which this process runs."""
        for _ in range(int(seconds)):
            self.now += 1
            self.clock.read()

    def pause(self, seconds: float = PAUSE_S) -> None:
        """Let time pass in which this process is paused."""
        self.now += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(own_pauses, "_GAP_S", GAP_S)
    monkeypatch.setattr(stamps, "monotonic", lambda: machine.now)
    monkeypatch.setattr(stamps, "wall", lambda: machine.now)
    monkeypatch.setattr(stamps, "paused_after", machine.clock.paused_after)
    for module in (stamps, connection, driver_heartbeats, reconciler, rounds):
        monkeypatch.setattr(module, "waited_since", machine.clock.waited_since)
    return machine


def test_a_wait_starts_anew_after_a_pause_and_only_then(machine: Machine) -> None:
    began = machine.now
    machine.run(20)
    assert machine.clock.waited_since(began) == 20
    machine.pause(GAP_S)  # as on a busy machine
    assert machine.clock.waited_since(began) == 20 + GAP_S
    machine.pause()
    assert machine.clock.waited_since(began) == 0
    machine.run(20)
    assert machine.clock.waited_since(began) == 20
    assert machine.clock.waited_since(machine.now - 5) == 5
    assert machine.clock.paused_after(began) == PAUSE_S
    assert machine.clock.paused_after(machine.now) == 0


def test_a_driver_that_was_paused_misses_no_worker(machine: Machine) -> None:
    events: list[object] = []
    board = WorkerConnections("127.0.0.1", 1, lambda *event: events.append(event))
    board.close()
    heard = connection._Connection(sock=None, opened=machine.now, heard=machine.now, rank=0)  # type: ignore[arg-type]
    board._connections[None] = heard  # type: ignore[index]
    machine.run(1)
    machine.pause(2 * WORKER_SILENCE_S)
    board._check_silence()
    assert events == []
    machine.run(WORKER_SILENCE_S + 1)
    board._check_silence()
    assert len(events) == 1


def test_a_reconciler_that_was_paused_takes_no_job_for_silent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "_is_doubtful", lambda job: True)
    monkeypatch.setattr(reconciler, "_activity", lambda job: (job,))
    monkeypatch.setattr(reconciler, "is_waiting", lambda job: False)
    silent = reconciler.SilentJobs(lambda: machine.now)
    assert silent.among(["job"]) == []  # type: ignore[list-item]
    machine.run(1)
    machine.pause()
    assert silent.among(["job"]) == []  # type: ignore[list-item]
    machine.run(JOB_SILENT_AFTER)
    assert silent.among(["job"]) == ["job"]  # type: ignore[list-item]


def test_a_waiting_process_that_was_paused_takes_no_head_for_silent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds.look, "view", lambda target, job: View(silence=Silence.NO_ANSWER))
    monkeypatch.setattr(rounds.look, "facts", lambda target, job, view, silent_for: silent_for)
    waiter = rounds.Waiter(SimpleNamespace(monotonic=lambda: machine.now))  # type: ignore[arg-type]
    silent_for: Callable[[], float] = lambda: waiter._facts(SimpleNamespace(heartbeat_at=None))  # type: ignore # noqa: E731
    assert silent_for() == 0
    machine.run(1)
    machine.pause()
    assert silent_for() == 0
    machine.run(HEAD_PATIENCE_S)
    assert silent_for() == HEAD_PATIENCE_S


def test_a_reconciler_that_was_paused_ends_no_lease(machine: Machine) -> None:
    lease = Lease(id="lease", ttl=LEASE_TTL, expires_at=machine.now + LEASE_TTL)
    lease.renewed_clock = stamps.stamp(lease.expires_at)
    snapshot: advance.scaling_plan.Snapshot = SimpleNamespace(lasting=set())  # type: ignore[assignment]
    machine.run(1)
    machine.pause(2 * LEASE_TTL)
    assert not advance._has_expired(snapshot, lease, machine.now)
    machine.run(LEASE_TTL)
    assert advance._has_expired(snapshot, lease, machine.now)


def test_deadlines_move_by_the_pause_of_the_reconciler_once(machine: Machine) -> None:
    pool = Pool(name="p", clock=stamps.present())
    machine.run(1)
    assert not rows.clock_has_jumped(pool)
    machine.pause()
    assert stamps.jump(pool.clock, stamps.present()) == PAUSE_S
    assert rows.clock_has_jumped(pool)
    pool.clock = stamps.present()
    assert not rows.clock_has_jumped(pool)
