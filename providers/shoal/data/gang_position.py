"""Rank of this process in its gang and the gang's size. A process outside a gang is rank 0 of 1."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class GangPosition:
    """Rank of a process in its gang, the gang's size, and the seed with which all its members plan the shards.

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
                f"rank must be from 0 to {self.world_size - 1} in a gang of {self.world_size}, not {self.rank}"
            )


ALONE = GangPosition(rank=0, world_size=1)

# A global and not a context variable: a new thread has an empty context, so a thread that the user starts in a worker
# would see rank 0 of 1 and read every row.
_position = ALONE


def current_position() -> GangPosition:
    """Return the gang position of this process; rank 0 of 1 outside a gang."""
    return _position


def set_current_position(position: GangPosition) -> None:
    """Set the gang position of this process; `ALONE` resets it. The training package calls this in each worker."""
    global _position
    _position = position
