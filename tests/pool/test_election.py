"""One of all who wait for a pool reconciles it."""

from __future__ import annotations

import os
import time

from shoal.pool.timeouts import TURN_PATIENCE
from shoal.pool.waiting import Turn
from shoal.state.home import lock_file

FILE = "waiting-p"


def set_age(seconds: float) -> None:
    at = time.time() - seconds
    os.utime(lock_file(FILE), (at, at))


def test_one_of_many_has_the_turn_until_it_gives_it_up(fresh_home, monkeypatch):
    monkeypatch.setattr("shoal.pool.waiting.TURN_PATIENCE", 3600.0)
    first, *others = [Turn("p") for _ in range(5)]
    assert first.take()
    assert [other.take() for other in others] == [False] * 4
    assert Turn("another-pool").take()
    others[0].close()
    assert first.take()
    first.close()
    assert [other.take() for other in others] == [True, False, False, False]


def test_the_turn_of_one_that_was_killed_or_paused_is_taken_over(fresh_home):
    dead, other = Turn("p"), Turn("p")
    assert dead.take()
    set_age(TURN_PATIENCE + 1)
    assert other.take()
    dead.close()
    assert other.take()


def test_a_clock_that_was_set_back_holds_nobody_up(fresh_home):
    assert Turn("p").take()
    set_age(-3600)
    assert Turn("p").take()


def test_a_file_that_cannot_be_written_holds_nobody_up(fresh_home):
    lock_file(FILE).mkdir()
    set_age(TURN_PATIENCE + 1)
    assert Turn("p").take()
