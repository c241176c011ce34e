"""Collect what is known of the loss of a worker that may be replaced.

A lost worker is reported twice: its socket to the driver closes, and its call ends. A worker that is replaced too early
would be taken for lost by the second report.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from shoal.training.gang.heartbeats import NODE_LOST
from shoal.training.timeouts import UNREACHABLE_WORKER_S

_REPORTS = 2


@dataclass(frozen=True, slots=True)
class Loss:
    """A report that a worker was lost.

    Args:
        rank: Rank of the worker.
        weight: Number by which the report with the most likely cause is the smallest.
        reason: Reason, as a clause.
    """

    rank: int
    weight: int
    reason: str


class Losses:
    """Reports on the workers that were lost, until each of them is complete."""

    def __init__(self) -> None:
        self._reports: dict[int, list[Loss]] = {}
        self._deadlines: dict[int, float] = {}

    @property
    def deadline(self) -> float:
        """Time at which a worker of which only one report has come counts as unreachable, from `time.monotonic`."""
        return min(self._deadlines.values(), default=math.inf)

    def add(self, loss: Loss) -> Loss | None:
        """Add a report, and return the most likely cause if the process of the worker has surely ended."""
        reports = self._reports.setdefault(loss.rank, [])
        reports.append(loss)
        if len(reports) < _REPORTS:
            self._deadlines[loss.rank] = time.monotonic() + UNREACHABLE_WORKER_S
            return None
        del self._reports[loss.rank], self._deadlines[loss.rank]
        return min(reports, key=lambda each: each.weight)


def is_of_worker(loss: Loss) -> bool:
    """Return whether only the worker was lost, as far as it is known, and not its node."""
    return NODE_LOST not in loss.reason
