"""Build the table of a job's partitions for its page: those that failed first, then the slowest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import ShoalError
from shoal.jobs import PartitionResults, load_partitions, partitions_so_far
from shoal.jobs.results import JobResult
from shoal.kinds.partitions.keys import shown_key
from shoal.kinds.partitions.spec import PARTITIONS
from shoal.state.schema import Job

_MOST_LINES = 50
"""Number of partitions that the page shows. `shoal many list` shows all."""

_READ_EVERY_S = 10.0
"""Seconds after which the result files of a running job are read again. There are up to a thousand of them."""


@dataclass(frozen=True)
class PartitionLine:
    """A partition, as the page shows it."""

    key: str
    status: str
    rows: int
    seconds: float
    attempts: int
    error: str


@dataclass(frozen=True)
class PartitionsView:
    """The partitions of a job that have ended.

    Attributes:
        counts: Number of partitions by status.
        worst: Those that failed, then the slowest, at most 50.
    """

    counts: Mapping[str, int]
    worst: Sequence[PartitionLine]

    @property
    def total(self) -> int:
        """Return the number of partitions that have ended."""
        return sum(self.counts.values())


def partitions_view(job: Job, result: JobResult | None, location: str | None) -> PartitionsView | None:
    """Return the partitions of an attempt; None if it has none, or if their files are not on this machine."""
    if job.spec.get("framework") != PARTITIONS or (location is not None and "://" in location):
        return None
    if result is not None:
        return _of_result(result.model_dump_json())
    return _so_far(job.id, job.attempt, int(time.monotonic() // _READ_EVERY_S))


@lru_cache(maxsize=64)
def _of_result(result: str) -> PartitionsView | None:
    try:
        return _view(load_partitions(JobResult.model_validate_json(result)))
    except (OSError, ValueError, ShoalError):
        return None  # the files were removed, or are on another host


@lru_cache(maxsize=16)
def _so_far(job_id: str, attempt: int, _turn: int) -> PartitionsView | None:
    try:
        return _view(partitions_so_far(job_id, attempt=attempt))
    except (OSError, ValueError, ShoalError):
        return None


def _view(results: PartitionResults) -> PartitionsView | None:
    if not len(results):
        return None
    worst = sorted(results, key=lambda each: (each.status == "succeeded", -each.seconds))[:_MOST_LINES]
    lines = [
        PartitionLine(shown_key(each.key), each.status, each.rows, each.seconds, each.attempts, each.error)
        for each in worst
    ]
    return PartitionsView(results.counts, lines)
