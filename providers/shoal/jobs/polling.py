"""Compute how long a process that waits for a job pauses between its checks of the job.

To poll a job means to update `last_polled_at` in its row. A job that no process has polled for `orphan_after` seconds
ends itself.
"""

from __future__ import annotations

from shoal.state.schema import Job

SHORTEST_PAUSE_S = 0.1
"""Shortest pause in seconds between two reads of a job's row. From 1 s of waiting on, the pause is a tenth of the time
waited, up to `_LONGEST_PAUSE_S`. So a waiting process notices the end of its job after at most a tenth of the time
waited."""

_LONGEST_PAUSE_S = 2.0
"""Longest pause in seconds between two reads of a job's row. The pause is not shorter because 200 processes that read
every second made `shoal jobs list` take three times as long."""

HEAD_CHECK_S = 3.0
"""Seconds between two requests to the head that ask whether the driver still runs. The requests are necessary because a
killed driver cannot record its end."""

_TURN_CHECK_S = 0.5
"""Seconds between two checks whether a waiting job may start. `_TURN_CHECK_PER_PLACE_S` is added to this value for each
place in the queue."""

_TURN_CHECK_PER_PLACE_S = 0.2
"""Seconds to add to `_TURN_CHECK_S` for each place in the queue. The processes of the jobs that start next therefore
check most often, and the number of checks grows slowly: 40 waiting processes together make 13 checks per second, and
200 waiting processes make 20."""

_PERIOD_S = 30.0
"""Seconds between two updates of `last_polled_at`. The period is far below the default `orphan_after` of 15 minutes, so
that no job ends by mistake. With this period, even hundreds of waiting processes cause little load."""

_PER_ORPHAN_AFTER = 3
"""Number of updates of `last_polled_at` within `orphan_after` seconds if `orphan_after` is short. So two updates may
fail before the job ends itself."""


def bounded_pause(wanted_s: float) -> float:
    """Return the seconds to pause before the next read of a job's row: `wanted_s`, but between 0.1 and 2 seconds."""
    return min(max(SHORTEST_PAUSE_S, wanted_s), _LONGEST_PAUSE_S)


def pause_after(waited_s: float) -> float:
    """Return the seconds to pause before the next read of the row of a job that has started.

    Args:
        waited_s: Seconds for which the process has waited for the job.
    """
    return bounded_pause(waited_s / 10)


def turn_check_s(position: int) -> float:
    """Return the seconds after which a process whose job waits in the queue checks again whether the job may start.

    Args:
        position: Position of the job in the queue, from 1.
    """
    return _TURN_CHECK_S + _TURN_CHECK_PER_PLACE_S * position


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
        """Return whether the waiting process has to update the job's `last_polled_at` now.

        Args:
            job: The job's present row.
            now: Seconds since the epoch, by this process's clock.
        """
        if job.last_polled_at != self._seen:
            self._since = job.last_polled_at if self._seen is None else now
            self._seen = job.last_polled_at
        period = min(_PERIOD_S, (job.orphan_after or _PERIOD_S * _PER_ORPHAN_AFTER) / _PER_ORPHAN_AFTER)
        # `now - self._since` is negative if this host's clock was set back, or is behind the clock that wrote
        # `last_polled_at`. In both cases the age of the last update is not known, so a new update is due.
        return not 0 <= now - self._since < period
