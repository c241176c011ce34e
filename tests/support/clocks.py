"""Clocks that jump, so that tests put hours into milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


class Clock:
    """The wall clock, which can be set, and the monotonic clock, which only passes."""

    def __init__(self) -> None:
        self._jumped = 0.0
        self._passed = 0.0

    def __call__(self) -> float:
        return time.time() + self._passed + self._jumped

    def monotonic(self) -> float:
        return _monotonic() + self._passed

    def pass_to(self, seconds: float) -> None:
        """Have so many seconds passed since the test began."""
        self._passed = seconds

    def set_ahead(self, seconds: float) -> None:
        """Set the wall clock ahead, as after a suspend: no time has passed that anybody could have used."""
        self._jumped = seconds


_monotonic: Callable[[], float] = time.monotonic


def installed(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that this process's stamps go by; its wall clock is also handed to whoever takes one."""
    clock = Clock()
    monkeypatch.setattr("shoal.state.stamps.wall", clock)
    monkeypatch.setattr("shoal.state.stamps.monotonic", clock.monotonic)
    return clock
