"""Notice that this process itself was paused, so that it does not take its own pause for the silence of others.

SIGSTOP, `docker pause` and the suspend of a virtual machine pause all threads of a process, while the monotonic clock
goes on. After the pause, everything that the process waits for seems to be overdue, although the other processes may
have been paused, too. The kernel does not tell a process that it was paused. So a thread reads the clock every second,
and a much longer gap between two readings counts as a pause, even if the thread has only waited for CPU time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_TICK_S = 1.0
"""Seconds between two readings of the clock."""

_GAP_S = 5.0
"""Seconds between two readings from which on the process counts as paused. Far above the delay of a thread on a busy
machine, and shorter than all limits on the silence of another process."""


class PauseClock:
    """Clock that knows when this process was last paused. Needs no lock: a lost reading only moves the start of a wait.

    Args:
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read_at = monotonic()
        self._pause = (-math.inf, -math.inf)

    def read(self) -> tuple[float, float]:
        """Read the clock, and return when the last pause began and when it ended, in seconds of the clock."""
        now, before = self._monotonic(), self._read_at
        if now - before > _GAP_S:
            self._pause = before, now
        self._read_at = now
        return self._pause

    def waited_since(self, moment: float, now: float | None = None) -> float:
        """Return how many seconds this process has waited since a moment. If it was paused since then, the wait starts
        anew at the end of the pause.

        Args:
            moment: The moment, as a reading of the clock.
            now: The present time, if the caller has read it; by default, the time of the clock.
        """
        _, woke_at = self.read()
        return (self._monotonic() if now is None else now) - max(moment, woke_at)

    def paused_after(self, moment: float) -> float:
        """Return the length in seconds of the last pause, if it began after a moment; otherwise 0."""
        began, ended = self.read()
        return ended - began if began > moment else 0.0


class _OfThisProcess(PauseClock):
    """The clock of this process, with a thread that reads it. A fork has no such thread until it reads the clock."""

    _thread: threading.Thread | None = None

    def read(self) -> tuple[float, float]:
        """Start the thread if it does not run, and read the clock."""
        if self._thread is None or not self._thread.is_alive():
            self._read_at = self._monotonic()
            self._thread = threading.Thread(target=self._tick, name="shoal-own-pauses", daemon=True)
            self._thread.start()
        return super().read()

    def threads(self) -> int:
        """Return the number of threads of the clock, 0 or 1. A fork may leave it out, because it holds no lock."""
        return int(self._thread is not None and self._thread.is_alive())

    def _tick(self) -> None:
        while True:
            super().read()
            time.sleep(_TICK_S)


_clock = _OfThisProcess()
waited_since = _clock.waited_since
paused_after = _clock.paused_after
threads = _clock.threads
