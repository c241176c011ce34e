"""Show the progress of a boosting training: a bar in a terminal, lines in a log."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.training.boosting.task import History
from shoal.training.context import say

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE = re.compile(r"round (\d+) of (\d+)(.*)")
# Few lines keep the log short, but a user who watches the log should see that the training is not hanging.
_SAY_EVERY_SECONDS = 10.0


class Rounds:
    """Display of the finished rounds; a context manager that removes the progress bar at the end.

    Args:
        quiet: Whether to print no progress lines, because the training prints its metrics itself.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._said = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, rounds: int, total: int, history: History) -> None:
        """Show that a number of rounds are finished.

        Args:
            rounds: Number of finished rounds.
            total: Number of all rounds.
            history: Metrics of the finished rounds.
        """
        latest = "".join(
            f", {name}-{metric}: {values[-1]:.5g}"
            for name, metrics in history.items()
            for metric, values in metrics.items()
        )
        if sys.stderr.isatty():
            self._show(rounds, total, latest)
        elif not self._quiet and time.monotonic() - self._said >= _SAY_EVERY_SECONDS:
            self._said = time.monotonic()
            say(f"round {rounds} of {total}{latest}")

    def read(self, line: str) -> None:
        """Print a line of a training's log, or update the bar if the line reports progress."""
        told = _LINE.fullmatch(line)
        if told and sys.stderr.isatty():
            self._show(int(told[1]), int(told[2]), told[3])
        else:
            say(line)

    def _show(self, rounds: int, total: int, latest: str) -> None:
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
            )
            self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=rounds, total=total, description=latest.removeprefix(", "))
