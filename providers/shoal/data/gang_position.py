"""Store the rank of this process in its gang (the group of workers of one training) and the size of the gang.

A process that belongs to no gang has rank 0 in a gang of size 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class GangPosition:
    """Rank of a process in its gang (the workers of one training), size of the gang, and seed for the assignment of
    rows to workers.

    All workers compute the same assignment (the shard plan) with the same seed.

    Raises:
        InvalidArgumentError: If `rank` is negative or not below `world_size`.
    """

    rank: int
    """Rank of the process, from 0."""
    world_size: int
    """Number of workers in the gang."""
    seed: int = 0
    """Seed of the shard plan, the same in all workers."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(
                f"rank must be from 0 to {self.world_size - 1} in a gang of {self.world_size} workers, not {self.rank}"
            )


ALONE = GangPosition(rank=0, world_size=1)

# The position is stored in a global variable and not in a context variable, because a new thread begins with an empty
# context. With a context variable, a thread that the user starts in a worker would get rank 0 and read all rows.
_position = ALONE


def current_position() -> GangPosition:
    """Return the rank of this process and the size of its gang (the workers of one training).

    A process that belongs to no gang has rank 0 in a gang of size 1.
    """
    return _position


def set_current_position(position: GangPosition) -> None:
    """Set the rank of this process and the size of its gang (the workers of one training).

    The training package calls this function in each worker.
    """
    global _position
    _position = position
