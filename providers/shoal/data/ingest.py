"""Ingesters: how a worker gets the rows of its shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from shoal.data.planning.row_groups import Shard

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


class Ingester(Protocol):
    """What reads a shard's rows; made once per worker."""

    name: ClassVar[str]
    worker_cpu_fraction: ClassVar[float]
    source: ParquetSource

    def __init__(self, source: ParquetSource) -> None: ...

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields one table per row range of `shard`, in their order."""
        ...


class ArrowIngester:
    """Reads row groups straight from storage with Arrow, one at a time, in the worker's own process.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "arrow"
    # Share of a worker's CPUs that the worker itself claims.
    worker_cpu_fraction: ClassVar[float] = 1.0

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields one table per row range of the shard, in their order, and keeps none of them.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            DataError: If a file is gone, corrupt, changed since it was planned, or lacks a column; it names the file.
        """
        return self.source.read(shard.ranges, columns)


class RayDataIngester:
    """Reads row groups in Ray Data tasks beside the worker, for pipelines that transform on the way.

    The plan is the same as the `ArrowIngester`'s, and so are the tables: each worker runs a stream of its own over its
    own row ranges. Ray's own way of sharding (``streaming_split(equal=True)``) drops rows, so it is not used.

    Args:
        source: The dataset.
    """

    name: ClassVar[str] = "ray"
    # The other half stays free for the read tasks: two workers that claimed 0.8 of a CPU each on two CPUs left none,
    # and hung.
    worker_cpu_fraction: ClassVar[float] = 0.5

    def __init__(self, source: ParquetSource) -> None:
        self.source = source

    def iter_batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields one table per row range of the shard, in their order; at most two are read ahead.

        Args:
            shard: The rows to read.
            columns: Columns to read, in this order; all by default.

        Raises:
            InvalidArgumentError: If this process is not connected to Ray.
            DataError: If a file is gone, corrupt, changed since it was planned, or lacks a column; it names the file.
        """
        from shoal.data import ray_data

        return ray_data.iter_ranges(self.source, shard.ranges, columns)


INGESTERS: dict[str, type[ArrowIngester] | type[RayDataIngester]] = {
    ArrowIngester.name: ArrowIngester,
    RayDataIngester.name: RayDataIngester,
}
