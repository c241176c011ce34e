"""Which unfinished jobs give no sign of life, so that their pool's head has to be asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from shoal.state.process import ProcessId
from shoal.state.schema import Job, JobState

_PATIENCE_S = 30.0
"""Without a change in its row. A driver leaves a sign of life every 5 s, and a submission takes up to 15 s."""


class SilentJobs:
    """Watches the rows of unfinished jobs, by this process's monotonic clock.

    Args:
        monotonic: Seconds by a clock that never jumps.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._unchanged_since: dict[tuple[object, ...], float] = {}

    def among(self, unfinished: Iterable[Job]) -> list[Job]:
        """Those that nobody answers for, and whose rows have not changed for long.

        Args:
            unfinished: All jobs to watch; one that is missing here is forgotten.
        """
        now = self._monotonic()
        doubtful = {_sign(job): job for job in unfinished if _is_doubtful(job)}
        self._unchanged_since = {sign: self._unchanged_since.get(sign, now) for sign in doubtful}
        return [job for sign, job in doubtful.items() if now - self._unchanged_since[sign] >= _PATIENCE_S]


def _is_doubtful(job: Job) -> bool:
    """Whether the process that is responsible for a job is not seen to run on this host."""
    if job.state is JobState.PENDING:
        return job.submitter is not None and not ProcessId.from_json(job.submitter).alive()
    if job.driver is None:
        return False
    driver = ProcessId.from_json(job.driver)
    # Another host's driver of shoal 0.1 leaves no sign of life.
    return driver.known_dead() or (job.heartbeat_at is not None and not driver.alive())


def _sign(job: Job) -> tuple[object, ...]:
    return job.id, job.attempt, job.state, job.heartbeat_at if job.driver else job.last_polled_at
