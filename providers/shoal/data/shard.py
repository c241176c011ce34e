"""Where this process stands in a gang, and the rows that are its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.data.plan import Shard
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from shoal.data.ingest import Ingester


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


class DataShard:
    """One worker's rows of a dataset, read straight from storage.

    Args:
        ingester: Reads the rows.
        shard: Which rows.
        position: Where the worker stands in its gang.
    """

    def __init__(self, ingester: Ingester, shard: Shard, position: GangPosition) -> None:
        self.ingester = ingester
        self.shard = shard
        self.position = position

    def __repr__(self) -> str:
        return f"DataShard(rank={self.position.rank} of {self.position.world_size}, rows={self.shard.rows})"

    def num_rows(self) -> int:
        """Number of rows of this worker."""
        return self.shard.rows

    def iter_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields one table per row range of the shard.

        Args:
            columns: Columns to read, in this order; all by default.
        """
        return self.ingester.iter_batches(self.shard, columns)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads the whole shard into one table."""
        import pyarrow as pa

        return pa.concat_tables(self.iter_batches(columns))

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Reads the shard into a DataFrame.

        Args:
            limit: Number of rows to read at most; all by default.
        """
        from shoal.data.reading import take_rows

        frame: pd.DataFrame = take_rows(self.iter_batches(), limit).to_pandas()
        return frame
