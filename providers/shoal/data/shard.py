"""The rows of a dataset that one worker of a gang reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.data.gang_position import GangPosition
from shoal.data.planning.row_groups import Shard
from shoal.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from shoal.data.ingest import Ingester
    from shoal.data.torch.dataset import TorchDataset


class DataShard:
    """One worker's rows of a dataset, read straight from storage.

    Args:
        ingester: Reads the rows.
        shard: Which rows.
        position: Where the worker stands in its gang.
        largest: Rows of the gang's largest shard; by default, of this one.
    """

    def __init__(self, ingester: Ingester, shard: Shard, position: GangPosition, largest: int | None = None) -> None:
        self.ingester = ingester
        self.shard = shard
        self.position = position
        self.largest = shard.rows if largest is None else largest

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
        from shoal.data.parquet.reading import take_rows

        frame: pd.DataFrame = take_rows(self.iter_batches(), limit).to_pandas()
        return frame

    def to_torch_dataset(
        self,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last_batch: bool = False,
        columns: Sequence[str] | None = None,
        pad: bool = True,
    ) -> TorchDataset:
        """Makes a torch ``IterableDataset`` of the shard's rows.

        Args:
            batch_size: Rows per item: a dict of column -> tensor ``[batch_size]``, or a list for text and bytes. None:
                an item is a row, a dict of column -> int, float, bool, str or bytes.
            shuffle: Whether each ``iter()`` is a new epoch in an order of its own, which the gang's seed and the rank
                tell.
            drop_last_batch: Whether a last batch of fewer rows is left out. Without `batch_size` it means nothing.
            columns: Columns to hand out, in this order; all by default.
            pad: Whether some of the shard's rows come twice, so that every rank has as many as the largest shard, and
                none waits in a collective operation for one that has run out.

        Returns:
            A :class:`shoal.data.torch.dataset.TorchDataset`, to be handed to a DataLoader or read as it is.

        Raises:
            DataError: If a column is missing, torch has no type for it or files differ in it, or there are no rows.
        """
        try:
            from shoal.data.torch.dataset import TorchDataset
        except ImportError as exc:
            raise MissingExtraError("torch", "torch") from exc
        return TorchDataset(
            self.ingester,
            self.shard.ranges,
            self.largest if pad else self.shard.rows,
            self.position,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last_batch=drop_last_batch,
            columns=columns,
        )
