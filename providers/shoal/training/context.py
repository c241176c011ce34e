"""Store a worker's rank, and the functions with which the worker sends log lines and notes to the driver.

The workers of one training form a gang. A note is JSON data for the driver, such as the latest metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.data.planning import ALONE, GangPosition, set_current_position


def say(text: str) -> None:
    """Print a line in this process and flush the output."""
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class GangContext:
    """A worker's rank in its gang (the group of workers of one training) and its connection to the driver.

    Args:
        position: Rank of this worker, number of workers, and the seed of the shard plan.
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
