"""Rank of this process in its gang and the gang's size. A process outside a gang is rank 0 of 1."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class GangPosition:
    """Rank of a process in its gang, the gang's size, and the seed with which all its members plan the shards."""

    rank: int
    """Rank of the process, from 0."""
    world_size: int
    """Number of workers in the gang."""
    seed: int = 0
    """Seed of the shard plan, the same in all workers."""


ALONE = GangPosition(rank=0, world_size=1)

# A global and not a context variable: a new thread has an empty context, so a thread that the user starts in a worker
# would see rank 0 of 1 and read every row.
_position = ALONE


def current_shard() -> GangPosition:
    """Return the gang position of this process; rank 0 of 1 outside a gang."""
    return _position


def set_current_shard(rank: int, world_size: int, seed: int = 0) -> None:
    """Set the gang position of this process. The training package calls this once in each worker.

    Args:
        rank: Rank of this worker, from 0.
        world_size: Number of workers in the gang.
        seed: Seed of the plan, the same in all workers.

    Raises:
        InvalidArgumentError: If `rank` is negative or not below `world_size`.
    """
    global _position
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank must be from 0 to {world_size - 1} in a gang of {world_size}, not {rank}")
    _position = GangPosition(rank, world_size, seed)


def clear_current_shard() -> None:
    """Reset the gang position of this process to rank 0 of 1."""
    global _position
    _position = ALONE
