"""Progress of a training: a small record for the job's row, and its display: a bar in a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from shoal.training.context import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_MOST_METRICS = 20
_LONGEST_NAME = 100
"""Limits of a record: it is written with every heartbeat, and users choose the names of metrics and eval sets."""

# Few lines keep the log short, but a user who watches the log should see that the training is not hanging.
_SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """Progress of a training.

    Attributes:
        done: Number of finished rounds of boosting; for functions, the step that rank 0 reported last.
        total: Number of all rounds; None where it is not known, as for functions.
        unit: Unit of `done` and `total`.
        metrics: Latest metrics by name, at most 20.
    """

    done: int
    total: int | None
    unit: Literal["rounds", "steps"]
    metrics: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the record for the job's row, with a bounded number of metrics."""
        return {**asdict(self), "metrics": bounded(self.metrics)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Progress:
        """Build the record from a job's row."""
        return cls(document["done"], document["total"], document["unit"], document["metrics"])

    @property
    def brief(self) -> str:
        """The record without metrics, for example ``round 12 of 100``."""
        return f"{self.unit[:-1]} {self.done}" + ("" if self.total is None else f" of {self.total}")

    @property
    def latest(self) -> str:
        """The metrics, for example ``eval-rmse: 2.5, eval-mae: 1.25``."""
        return ", ".join(f"{name}: {value:.5g}" for name, value in self.metrics.items())

    def __str__(self) -> str:
        """Return the record as a log line."""
        return ", ".join(filter(None, (self.brief, self.latest)))


OnProgress = Callable[[Progress], None]
"""Function that is called with the progress of a training when it has changed."""


def bounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the first 20 metrics, with names of at most 100 characters."""
    first = islice(metrics.items(), _MOST_METRICS)
    # Lone surrogates can be neither printed nor written as JSON.
    return {name[:_LONGEST_NAME].encode(errors="backslashreplace").decode(): value for name, value in first}


class ProgressDisplay:
    """Display of a training's progress; a context manager that removes the bar at the end.

    Args:
        first_line_s: Seconds until the first line, where stderr is no terminal; more lines follow every 10 s. Infinity:
            print no lines, because the training or its log prints them.
    """

    def __init__(self, *, first_line_s: float) -> None:
        self._next_line = time.monotonic() + first_line_s
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Update the bar, or print a line if the last line is old enough."""
        if sys.stderr.isatty():
            self._show(progress)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SAY_EVERY_SECONDS
            say(str(progress))

    def _show(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        if self._bar is None:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # output into a file or pipe stays there
            )
            self._bar.add_task("", total=progress.total)
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0], completed=progress.done, total=progress.total, description=progress.latest
        )
