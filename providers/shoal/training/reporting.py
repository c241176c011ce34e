"""Report from workers to the driver and the user: log lines, notes, progress and metrics.

The workers of one training form a gang. A note is JSON data for the driver, such as the latest metrics. The progress is
recorded in the job's database row, and displayed as a bar or as log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from shoal.data.planning import ALONE, GangPosition, set_current_position
from shoal.training.timeouts import PROGRESS_LINE_PERIOD_S

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


def say(text: str) -> None:
    """Print a line in this process and flush the output."""
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class GangContext:
    """A worker's rank in its gang (the group of workers of one training) and its connection to the driver.

    Args:
        local_world_size: Number of workers on this worker's node.
        log: Function that prints a line in the driver, where the user sees it.
        note: Function that sends JSON data to the driver.
        ask: Function that sends JSON data to the driver, and waits for the driver's answer; None if this process
            belongs to no gang.
    """

    position: GangPosition = ALONE
    local_world_size: int = 1
    log: Callable[[str], None] = say
    note: Callable[[Mapping[str, Any]], None] = lambda note: None
    ask: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0."""
        return self.position.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return self.position.world_size


# The context is stored in a global variable and not in a `contextvars.ContextVar`, so that threads that the user starts
# in a worker get the worker's rank, too.
_context = GangContext()


def gang_context() -> GangContext:
    """Return this process's rank and connection to the driver.

    A process that belongs to no gang counts as rank 0 of a gang with one worker.
    """
    return _context


def set_gang_context(context: GangContext) -> None:
    """Set this process's rank and connection to the driver.

    The rank also determines which rows of a dataset this process reads.
    """
    global _context
    set_current_position(context.position)
    _context = context


_MOST_METRICS = 20
_LONGEST_NAME = 100
"""Maximum number of metrics in a progress record, and maximum length of a metric's name. The record is written to the
database with every heartbeat of the job, and users choose the names, so the size of the record must be limited."""


@dataclass(frozen=True)
class Progress:
    """Progress of a training or prediction: number of finished rounds, steps, rows or trials, and the latest metrics.

    Attributes:
        done: Number of finished boosting rounds or trials, or of predicted rows. For a training function: the last step
            that rank 0 reported.
        total: Total number of rounds, trials or rows; None if the number is unknown, as for training functions.
        unit: Unit of `done` and `total`.
        metrics: Latest metrics by name, at most 20.
    """

    done: int
    total: int | None
    unit: Literal["rounds", "steps", "rows", "trials"]
    metrics: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the progress as a dict for the job's database row, with at most 20 metrics."""
        return {**asdict(self), "metrics": bounded(self.metrics)}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Progress:
        """Create a progress object from a dict that :meth:`document` has returned."""
        return cls(document["done"], document["total"], document["unit"], document["metrics"])

    @property
    def brief(self) -> str:
        """Progress as a text without metrics, such as ``round 12 of 100``."""
        return f"{self.unit[:-1]} {self.done}" + ("" if self.total is None else f" of {self.total}")

    @property
    def latest(self) -> str:
        """Latest metrics as a text, such as ``eval-rmse: 2.5, eval-mae: 1.25``."""
        return ", ".join(f"{name}: {value:.5g}" for name, value in self.metrics.items())

    def __str__(self) -> str:
        """Return the progress and the latest metrics as one log line."""
        return ", ".join(filter(None, (self.brief, self.latest)))


OnProgress = Callable[[Progress], None]
"""Type of a function that is called with the new progress each time the progress of a training changes."""


class MetricSink(Protocol):
    """Receiver of all metrics of a job, each once, while the job runs."""

    def log(self, rank: int, values: Mapping[str, float], step: int) -> None:
        """Receive the metrics of a rank at a step, by name. Names of ranks other than 0 begin with ``rank-1/`` etc."""

    def continued(self) -> None:
        """Note that the job continues from a checkpoint, before it logs a step that it has logged before."""


HOLDOUT = "holdout"
"""Name of the rows by which models, or the trials of a search, are compared."""


def metric_name(rows: str, metric: str) -> str:
    """Return the name of a metric on an eval set or on the holdout: ``eval-rmse``, ``holdout-ndcg@10``."""
    return f"{rows}-{metric}"


def bounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the first 20 metrics of a dict, with their names cut to at most 100 characters."""
    first = islice(metrics.items(), _MOST_METRICS)
    # Lone surrogates (invalid characters) can be neither printed nor written as JSON, so they are replaced by escape
    # sequences.
    return {name[:_LONGEST_NAME].encode(errors="backslashreplace").decode(): value for name, value in first}


class ProgressDisplay:
    """Context manager that displays a training's progress: as a bar in a terminal, otherwise as log lines.

    The bar is removed when the context ends.

    Args:
        first_line_s: Seconds until the first line is printed if stderr is not a terminal. Further lines follow every 10
            s. ``math.inf`` prints no lines, for trainings that print their metrics themselves.
        on_progress: Function that gets what is shown, too.
    """

    def __init__(self, *, first_line_s: float, on_progress: OnProgress | None = None) -> None:
        self._next_line = time.monotonic() + first_line_s
        self._bar: Bar | None = None
        self._on_progress = on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Update the progress bar in a terminal; otherwise print a progress line, at most one every 10 s."""
        if sys.stderr.isatty():
            self._show(progress)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PROGRESS_LINE_PERIOD_S
            say(str(progress))
        if self._on_progress is not None:
            self._on_progress(progress)

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
                # In a terminal, Rich prints the output of this process above the bar. If stdout is a file or a pipe,
                # the output must go there and not to the terminal.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.add_task("", total=progress.total)
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0], completed=progress.done, total=progress.total, description=progress.latest
        )
