"""The metrics that workers log: handed on as they come, and shown in a bar in a terminal, in lines in a log."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shoal.training.context import say
from shoal.training.pytorch.context import described

if TYPE_CHECKING:
    from rich.status import Status

# As of a boosting: enough not to look like a hang, few enough to be read later.
_SAY_EVERY_SECONDS = 10.0

OnMetrics = Callable[[int, dict[str, float], int], None]
"""Called with rank, values and step, for each time that a rank logs metrics."""


class Metrics:
    """What a run's ranks have logged; as a context manager it ends the display.

    Args:
        on_metrics: Called with rank, values and step.

    Attributes:
        last: The last value of each metric of rank 0.
    """

    def __init__(self, on_metrics: OnMetrics | None = None) -> None:
        self.last: dict[str, float] = {}
        self._on_metrics = on_metrics
        self._steps: Counter[int] = Counter()
        self._said = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, rank: int, note: dict[str, Any]) -> None:
        """Takes what a worker told the driver."""
        values: dict[str, float] = note["metrics"]
        step = self._steps[rank] if note["step"] is None else int(note["step"])
        self._steps[rank] = step + 1
        if self._on_metrics:
            self._on_metrics(rank, values, step)
        if rank == 0:
            self.last.update(values)
            self._show(described(values, step))

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            if self._status is None:
                from rich.console import Console

                self._status = Console(stderr=True).status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._said >= _SAY_EVERY_SECONDS:
            self._said = time.monotonic()
            say(text)
