"""Define the ingesters: the classes that read the rows of a worker's shard, one with Arrow and one with Ray Data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from shoal.data.planning.row_groups import Shard

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


class Ingester(Protocol):
    """Interface of the classes that read the rows of a shard. Each worker creates one instance."""

    name: ClassVar[str]
    worker_cpu_fraction: ClassVar[float]
    source: ParquetSource

    def __init__(self, source: ParquetSource) -> None: ...

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the rows of a shard (one worker's rows) in order. Yield one table per row range (rows of one row
        group)."""
        ...


class ArrowIngester:
    """Ingester that reads row groups from storage with Arrow, one at a time, in the worker's own process.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "arrow"
    # Fraction of a worker's CPUs that the worker process requests from Ray. Arrow reads the rows in the worker process,
    # so no other process needs CPUs to read them.
    worker_cpu_fraction: ClassVar[float] = 1.0

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the rows of a shard (one worker's rows) in order. Yield one table per row range (rows of one row group).

        Only one table is in memory at a time.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            DataError: If a file is gone, corrupt, has changed since the plan was made, or lacks a column. The message
                names the file.
        """
        return self.source.read(shard.ranges, columns)


class RayDataIngester:
    """Ingester that reads row groups in Ray Data tasks, outside the worker's process.

    Each worker gets the same rows and tables as with `ArrowIngester`. Each worker runs one Ray Data stream over the row
    ranges of its shard. Ray's own sharding (``streaming_split(equal=True)``) is not used, because it drops rows.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "ray"
    # Fraction of a worker's CPUs that the worker process requests from Ray. Half of the CPUs stay free for Ray's read
    # tasks. In a test on a host with two CPUs, two workers that requested 0.8 CPUs each left too little for the read
    # tasks, and hung.
    worker_cpu_fraction: ClassVar[float] = 0.5

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the rows of a shard (one worker's rows) in order. Yield one table per row range (rows of one row group).

        At most two tables are read ahead.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            InvalidArgumentError: If this process is not connected to Ray.
            DataError: If a file is gone, corrupt, has changed since the plan was made, or lacks a column. The message
                names the file.
        """
        from shoal.data import ray_data

        return ray_data.iter_ranges(self.source, shard.ranges, columns)


INGESTERS: dict[str, type[ArrowIngester] | type[RayDataIngester]] = {
    ArrowIngester.name: ArrowIngester,
    RayDataIngester.name: RayDataIngester,
}
