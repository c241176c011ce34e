"""Measure the seconds of each step of an attempt, from the submission to the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.jobs.results import JobTimes
from shoal.state.schema import Job


class Stopwatch:
    """Stopwatch that measures the seconds of each step of one attempt. The driver creates the stopwatch when the driver
    starts.

    Args:
        job: The attempt's row.
        now: Time of the driver's start in seconds since the epoch.
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    def __init__(self, job: Job, now: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        sent_at = job.admitted_at or job.created_at
        self._queue_s = max(0.0, sent_at - job.created_at)
        self._before_s = max(0.0, now - sent_at)
        self._monotonic = monotonic
        self._begun = self._worked_until = monotonic()
        self._read_s: float | None = None
        self._train_s = self._search_s = 0.0
        self._score_s: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds since the driver's start."""
        return self._monotonic() - self._begun

    def worked(self, *, train_s: float, read_s: float | None = None) -> None:
        """Record that the workers have finished now, and how long they have read and trained."""
        self._worked_until = self._monotonic()
        self._read_s, self._train_s = read_s, train_s + self._search_s

    def searched(self, seconds: float) -> None:
        """Record that the workers have run the trials of a search for so long. They may train further."""
        self._search_s = seconds
        self.worked(train_s=0.0)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Measure the seconds of the `with` block, which compares the model with the champion.

        If there are several such blocks, their seconds are added up.
        """
        began = self._monotonic()
        try:
            yield
        finally:
            self._score_s = (self._score_s or 0.0) + self._monotonic() - began

    def times(self) -> JobTimes:
        """Return the seconds that each step has taken up to now, and print them to the job's log."""
        worked_s = (self._read_s or 0.0) + self._train_s
        times = JobTimes(
            queue=self._queue_s,
            start=max(0.0, self._before_s + self._worked_until - self._begun - worked_s),
            read=self._read_s,
            train=self._train_s,
            score=self._score_s,
            upload=max(0.0, self._monotonic() - self._worked_until - (self._score_s or 0.0)),
        )
        print(f"seconds: {times}", flush=True)
        return times
