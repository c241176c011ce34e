from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import JobError
from shoal.jobs.journal.steps import store_lock
from shoal.state import Store
from shoal.state.schema import Lock


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_only_one_at_a_time(store):
    inside: list[int] = []
    together = []

    def work(number: int) -> None:
        with store_lock(Store(), "promote", 60.0, sleep=lambda _: None):
            inside.append(number)
            together.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))

    assert together == [1] * 8


def test_it_is_free_again_after_an_error(store):
    with pytest.raises(ValueError, match="inside"), store_lock(store, "promote", 60.0):
        raise ValueError("inside")

    with store.transaction() as session:
        assert session.get(Lock, "promote") is None


def test_a_dead_holders_lock_is_taken_when_it_has_expired(store):
    clock = Clock()
    with store.transaction() as session:
        session.add(Lock(name="promote", holder="dead", expires_at=10.0))

    with store_lock(store, "promote", 60.0, clock=clock, sleep=clock.sleep):
        assert clock.now >= 10.0


def test_a_dead_holders_lock_is_taken_after_its_time_to_live_though_the_clock_was_set_back(store):
    """Or though the holder's host, which shares the store, was ahead by that."""
    clock = Clock()
    with store.transaction() as session:
        session.add(Lock(name="promote", holder="dead", expires_at=3600.0))

    with store_lock(store, "promote", 2.0, clock=clock, monotonic=clock, sleep=clock.sleep):
        assert 2.0 <= clock.now < 3600.0


def test_a_lock_that_its_holder_renews_is_not_taken(store):
    clock = Clock()
    with store.transaction() as session:
        session.add(Lock(name="promote", holder="other", expires_at=3600.0))

    def renew_and_sleep(seconds: float) -> None:
        clock.sleep(seconds)
        with store.transaction() as session:
            session.get_one(Lock, "promote").expires_at = 3600.0 + clock.now

    with (
        pytest.raises(JobError, match='held the lock "promote" for'),
        store_lock(store, "promote", 2.0, patience=5.0, clock=clock, monotonic=clock, sleep=renew_and_sleep),
    ):
        pytest.fail("not reached")


def test_on_postgresql_a_lock_expires_by_the_databases_clock(on_postgresql, fresh_home):
    """This host's clock is years behind."""
    clock = Clock()
    with Store().transaction() as session:
        session.add(Lock(name="promote", holder="dead", expires_at=1e9))

    with store_lock(Store(), "promote", 60.0, clock=clock, monotonic=clock, sleep=clock.sleep):
        assert clock.now == 0.0
        with Store().reading() as session:
            assert session.get_one(Lock, "promote").expires_at > 1e9


def test_patience_ends(store):
    clock = Clock()
    with store.transaction() as session:
        session.add(Lock(name="promote", holder="other", expires_at=1e9))

    with (
        pytest.raises(JobError, match='held the lock "promote" for'),
        store_lock(store, "promote", 60.0, patience=5.0, clock=clock, monotonic=clock, sleep=clock.sleep),
    ):
        pytest.fail("not reached")


def test_a_holder_that_was_too_slow_does_not_free_the_next_ones_lock(store):
    clock = Clock()
    with store_lock(store, "promote", 1.0, clock=clock, sleep=clock.sleep):
        clock.now = 5.0
        with store_lock(store, "promote", 60.0, clock=clock, sleep=clock.sleep):
            pass
        with store.transaction() as session:
            session.add(Lock(name="promote", holder="third", expires_at=99.0))

    with store.transaction() as session:
        assert session.get_one(Lock, "promote").holder == "third"


def test_a_lock_is_renewed_by_its_holder_and_by_nobody_who_lost_it(store):
    clock = Clock()
    with store_lock(store, "promote", 1.0, clock=clock, sleep=clock.sleep) as first:
        clock.now = 5.0
        with store.transaction() as session:
            assert first.renew(session)  # it had expired, and nobody had taken it
            assert session.get_one(Lock, "promote").expires_at == 6.0
        clock.now = 10.0
        with (
            store_lock(store, "promote", 1.0, clock=clock, sleep=clock.sleep) as second,
            store.transaction() as session,
        ):
            assert not first.renew(session)
            assert second.renew(session)
        with store.transaction() as session:
            assert not first.renew(session)
