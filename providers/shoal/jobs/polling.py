"""Decide when a waiter has to note in a job's row that it asks, so that the job does not end itself."""

from __future__ import annotations

from shoal.state.schema import Job

_PERIOD_S = 30.0
"""Far below the default `orphan_after` of 15 minutes, and so seldom that hundreds of waiters do not feel each other."""

_PER_ORPHAN_AFTER = 3
"""With a short `orphan_after`, two writes may be missed before the job ends itself."""


class Asking:
    """Decides when one waiter has to note that it asks: not while another waiter of the same job does.

    It counts by its own clock for how long `last_polled_at` has kept its value, because another host's clock may have
    written it. Only its first look compares the two: a process that asks once has nothing else to go by.
    """

    def __init__(self) -> None:
        self._seen: float | None = None
        self._since = 0.0

    def is_due(self, job: Job, now: float) -> bool:
        """Whether to write now.

        Args:
            job: The row as it is.
            now: Seconds since the epoch, by this process's clock.
        """
        if job.last_polled_at != self._seen:
            self._since = job.last_polled_at if self._seen is None else now
            self._seen = job.last_polled_at
        period = min(_PERIOD_S, (job.orphan_after or _PERIOD_S * _PER_ORPHAN_AFTER) / _PER_ORPHAN_AFTER)
        return not 0 <= now - self._since < period  # below 0: a clock was set back, or is ahead of this one
