"""Where code that runs in a gang learns its place in it, and how it speaks to whoever started the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def say(text: str) -> None:
    """Prints a line in this process; in the driver, that is where the caller is.

    Args:
        text: The line, without its end.
    """
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """A worker's place in its gang.

    Args:
        rank: Rank of this worker, from 0.
        world_size: Number of workers.
        local_world_size: Number of workers on this worker's node.
        log: Prints a line where the training's caller is, not in the worker.
        note: Tells the driver something, in plain data.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    log: Callable[[str], None] = say
    note: Callable[[Mapping[str, Any]], None] = lambda note: None


# One per process: threads that the user starts in a worker are of the same rank.
_context = TrainingContext()


def get_context() -> TrainingContext:
    """The context of this process; outside a gang, rank 0 of 1."""
    return _context


def set_context(context: TrainingContext) -> None:
    """Sets the context; the gang calls it once in each worker."""
    global _context
    _context = context
