"""How old a stored value is: by the monotonic clock of one boot, on both stores."""

from __future__ import annotations

from shoal.state import Store, stamps
from shoal.state.schema import Job, JobState


def written(store: Store) -> tuple[float, dict | None]:
    """A time of the store's own clock, as it comes back."""
    with store.transaction() as session:
        now = stamps.shared_now(session, 5.25)
        session.add(
            Job(
                id="j", attempt=1, pool="p", holder="h", spec={}, state=JobState.PENDING, endpoint={}, created_at=0.0,
                last_polled_at=now, last_polled_clock=stamps.stamp(now),
            )
        )  # fmt: skip
    with store.reading() as session:
        job = session.get_one(Job, ("j", 1))
        return job.last_polled_at, job.last_polled_clock


def test_a_stamp_counts_the_seconds_since_it_was_written(either_store, monkeypatch):
    passed = [1000.0]
    monkeypatch.setattr(stamps, "monotonic", lambda: passed[0])
    value, stamp = written(Store())

    passed[0] += 90.0

    assert stamps.age(value, stamp) == 90.0


def test_a_value_that_was_changed_without_its_stamp_has_none(either_store):
    """Shoal 0.1 knows of no stamps."""
    value, stamp = written(Store())
    assert stamps.age(value + 1.0, stamp) is None
    assert stamps.age(value, None) is None


def test_a_stamp_of_another_boot_says_nothing(either_store):
    value, stamp = written(Store())
    assert stamps.age(value, {**stamp, "clock": "another boot"}) is None


def test_hosts_share_the_databases_clock(on_postgresql, fresh_home):
    with Store().transaction() as session:
        assert stamps.shared_now(session, 5.25) > 1.7e9


def test_a_store_of_one_host_goes_by_that_hosts_clock(fresh_home):
    with Store().transaction() as session:
        assert stamps.shared_now(session, 5.25) == 5.25


def clocks(monkeypatch, *, wall: float, monotonic: float) -> None:
    monkeypatch.setattr(stamps, "wall", lambda: wall)
    monkeypatch.setattr(stamps, "monotonic", lambda: monotonic)


def test_a_jump_is_what_the_wall_clock_moved_and_the_monotonic_clock_did_not(monkeypatch):
    clocks(monkeypatch, wall=5000.0, monotonic=100.0)
    before = stamps.present()
    for wall, monotonic, jump in [(5060.0, 160.0, 0.0), (8660.0, 160.0, 3600.0), (1460.0, 160.0, -3600.0)]:
        clocks(monkeypatch, wall=wall, monotonic=monotonic)
        assert stamps.jump(before, stamps.present()) == jump


def test_nothing_is_known_of_a_jump_since_another_boot(monkeypatch):
    assert stamps.jump({"clock": "another boot", "at": 0.0, "of": 0.0}, stamps.present()) is None
    assert stamps.jump(None, stamps.present()) is None


def test_a_process_that_is_stopped_between_two_clocks_reads_them_anew(monkeypatch):
    """Stopped for 600 s after it has read the monotonic clock."""
    readings = iter([100.0, 700.0, 700.0, 700.0])
    monkeypatch.setattr(stamps, "monotonic", lambda: next(readings))
    monkeypatch.setattr(stamps, "wall", lambda: 5600.0)
    present = stamps.present()
    assert (present["of"], present["at"]) == (5600.0, 700.0)
