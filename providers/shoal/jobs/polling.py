"""How often a process that waits for a job reads its row, checks its head, and updates its `last_polled_at`.

A job whose `last_polled_at` is not updated for `orphan_after` seconds ends itself.
"""

from __future__ import annotations

from shoal.state.schema import Job

SHORTEST_PAUSE_S = 0.5
"""Shortest pause between two reads of a job's row; after 5 s of waiting, the pause is a tenth of the time waited."""

_LONGEST_PAUSE_S = 2.0
"""Longest pause between two reads: 200 waiters that read every second tripled the time of `shoal jobs list`."""

HEAD_CHECK_S = 3.0
"""Seconds between two checks at the head whether the driver still runs; only a killed driver makes them necessary."""

_TURN_CHECK_S = 0.5
"""Shortest time in seconds between two looks of a waiter at the queue."""

_TURN_CHECK_PER_PLACE_S = 0.2
"""Seconds to add for each place in the queue: 40 waiters look 13 times a second together, 200 waiters 20 times, and the
first ones, which start next, most often."""

_PERIOD_S = 30.0
"""Seconds between updates of `last_polled_at`: far below the default `orphan_after` of 15 minutes, and cheap with
hundreds of waiters."""

_PER_ORPHAN_AFTER = 3
"""Updates within one `orphan_after` where that is short: two may fail before the job ends itself."""


def bounded_pause(wanted_s: float) -> float:
    """Return the seconds to pause before the next read of a job's row: `wanted_s`, within the limits."""
    return min(max(SHORTEST_PAUSE_S, wanted_s), _LONGEST_PAUSE_S)


def pause_after(waited_s: float) -> float:
    """Return the seconds to pause before the next read of the row of a job that has started.

    Args:
        waited_s: Seconds for which the process has waited for the job.
    """
    return bounded_pause(waited_s / 10)


def turn_check_s(position: int) -> float:
    """Return the seconds between two looks of a waiter at the queue.

    Args:
        position: Position of its job in the queue, from 1.
    """
    return _TURN_CHECK_S + _TURN_CHECK_PER_PLACE_S * position


class PollTimer:
    """Timer of one waiting process: tells when to update `last_polled_at`.

    No update is due while another process that waits for the same job makes the updates. The timer measures by this
    process's clock for how long `last_polled_at` has kept its value, because another host's clock may have written the
    value. Only the first call compares the value with this process's clock, because nothing else is known then.
    """

    def __init__(self) -> None:
        self._seen: float | None = None
        self._since = 0.0

    def is_due(self, job: Job, now: float) -> bool:
        """Return whether `last_polled_at` has to be updated now.

        Args:
            job: The job's present row.
            now: Seconds since the epoch, by this process's clock.
        """
        if job.last_polled_at != self._seen:
            self._since = job.last_polled_at if self._seen is None else now
            self._seen = job.last_polled_at
        period = min(_PERIOD_S, (job.orphan_after or _PERIOD_S * _PER_ORPHAN_AFTER) / _PER_ORPHAN_AFTER)
        return not 0 <= now - self._since < period  # below 0: this clock was set back, or another is ahead
