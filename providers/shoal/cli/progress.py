"""Show the progress of a pool while a command waits for it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from shoal.cli.output import console

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus


class PoolProgress:
    """A callback for `on_progress` that shows how many nodes of a pool are ready. On a terminal, it shows a progress
    bar. Otherwise, it prints lines.

    Without a terminal, a line is printed each time the number of nodes in a state changes.

    Args:
        doing: Description of the operation, for example "scaling retrain to 3".
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._console = console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said: set[str] = set()
        self._last = ""
        self._most = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[counts]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(self._doing, total=None, counts="")
            self._bar.start()
        else:
            self._console.print(f"{self._doing} …", soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, status: PoolStatus) -> None:
        """Show how many nodes are in which state, and print the error of each failed node once."""
        for node in status.failed:
            self._once(f"node {node.name} failed: {node.error or 'no reason recorded'} (log: {node.log})")
        counts = describe_counts(status)
        if self._bar is not None and self._task is not None:
            done, total = self._bar_lengths(status)
            self._bar.update(self._task, completed=done, total=total, counts=counts)
        elif counts != self._last:
            self._console.print(f"{status.name}: {counts}", soft_wrap=True)
        self._last = counts

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            (self._bar.console if self._bar else self._console).print(line, soft_wrap=True)

    def _bar_lengths(self, status: PoolStatus) -> tuple[int, int]:
        """Return the filled length and the full length of the progress bar, in nodes.

        While the pool grows, the lengths are the numbers of active and of wanted nodes. While the pool shrinks, the
        lengths are the numbers of nodes that have ended and of nodes that have to end.
        """
        there = len(status.active) + len(status.pending) + len(status.failed) + len(status.leaving)
        self._most = max(self._most, there)
        if there > status.target:
            return self._most - there, self._most - status.target
        return len(status.active), status.target


def describe_counts(status: PoolStatus) -> str:
    """Describe how many nodes of a pool are in which state, for example ``2 of 3 nodes active, 1 pending``."""
    more = [
        f"{len(nodes)} {what}"
        for what, nodes in (("pending", status.pending), ("failed", status.failed), ("leaving", status.leaving))
        if nodes
    ]
    return ", ".join([status.progress(), *more])
