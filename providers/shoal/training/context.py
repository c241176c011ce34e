"""Training context of a process: its rank in the gang, and functions to send log lines and notes to the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def say(text: str) -> None:
    """Print a line in this process and flush the output.

    Args:
        text: The line, without a line break at the end.
    """
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """A worker's position in its gang and its connection to the driver.

    Args:
        rank: Rank of this worker, from 0.
        world_size: Number of workers.
        local_world_size: Number of workers on this worker's node.
        log: Function that prints a line in the driver, where the user sees it.
        note: Function that sends JSON data to the driver.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    log: Callable[[str], None] = say
    note: Callable[[Mapping[str, Any]], None] = lambda note: None


# One context per process: threads that the user starts in a worker have the same rank.
_context = TrainingContext()


def get_context() -> TrainingContext:
    """Return the context of this process; outside a gang, this is rank 0 of 1 worker."""
    return _context


def set_context(context: TrainingContext) -> None:
    """Set the context of this process; the gang calls this function once in each worker."""
    global _context
    _context = context
