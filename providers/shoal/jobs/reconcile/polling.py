"""Compute how long a process that waits for a job pauses between its checks of the job.

To poll a job means to update `last_polled_at` in its row. A job that no process has polled for `orphan_after` seconds
ends itself.
"""

from __future__ import annotations

from shoal.jobs.timeouts import LONGEST_PAUSE_S, POLL_PERIOD_S, SHORTEST_PAUSE_S, TURN_CHECK_PER_PLACE_S, TURN_CHECK_S
from shoal.state.schema import Job

POLLS_PER_ORPHAN_AFTER = 3
"""Updates of `last_polled_at` within a short `orphan_after`, so that two of them may fail."""


def bounded_pause(wanted_s: float) -> float:
    """Return the seconds to pause before the next read of a job's row: `wanted_s`, but between 0.1 and 2 seconds."""
    return min(max(SHORTEST_PAUSE_S, wanted_s), LONGEST_PAUSE_S)


def pause_after(waited_s: float) -> float:
    """Return the seconds to pause between two reads of a job's row, if the job has started."""
    return bounded_pause(waited_s / 10)


def turn_check_s(position: int) -> float:
    """Return the seconds after which a process whose job waits in the queue checks again whether the job may start."""
    return TURN_CHECK_S + TURN_CHECK_PER_PLACE_S * position


class PollTimer:
    """Timer that tells a waiting process when to update the job's `last_polled_at`.

    No update is due while another process that waits for the same job makes the updates. The timer measures with this
    process's clock how long `last_polled_at` has stayed unchanged; the timer does not compare the value with the clock,
    because another host with a different clock may have written the value. Only the first call compares the value with
    the clock, because no earlier value is known at the first call.
    """

    def __init__(self) -> None:
        self._seen: float | None = None
        self._since = 0.0

    def is_due(self, job: Job, now: float) -> bool:
        """Return whether the waiting process has to update the job's `last_polled_at` now."""
        if job.last_polled_at != self._seen:
            self._since = job.last_polled_at if self._seen is None else now
            self._seen = job.last_polled_at
        period = min(
            POLL_PERIOD_S, (job.orphan_after or POLL_PERIOD_S * POLLS_PER_ORPHAN_AFTER) / POLLS_PER_ORPHAN_AFTER
        )
        # `now - self._since` is negative if this host's clock was set back, or is behind the clock that wrote
        # `last_polled_at`. In both cases the age of the last update is not known, so a new update is due.
        return not 0 <= now - self._since < period
