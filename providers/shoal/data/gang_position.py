"""Rank and size of the gang that this process belongs to; without a gang it is rank 0 of 1."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class GangPosition:
    """Rank and size of the gang that this process belongs to, and the seed that all its members plan with."""

    rank: int
    world_size: int
    seed: int = 0


ALONE = GangPosition(rank=0, world_size=1)

# One per process, not a context variable: a thread that the user starts in a worker must not take itself for rank 0 of
# 1 and read every row.
_position = ALONE


def current_shard() -> GangPosition:
    """Where this process stands; rank 0 of 1 outside a gang."""
    return _position


def set_current_shard(rank: int, world_size: int, seed: int = 0) -> None:
    """Says where this process stands; the training package calls it once in each worker.

    Args:
        rank: Rank of this worker, from 0.
        world_size: Number of workers in the gang.
        seed: Seed of the plan, the same in all workers.

    Raises:
        InvalidArgumentError: If `rank` is not below `world_size`.
    """
    global _position
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank {rank} is not one of a gang of {world_size}")
    _position = GangPosition(rank, world_size, seed)


def clear_current_shard() -> None:
    """Leaves the gang: rank 0 of 1 again."""
    global _position
    _position = ALONE
