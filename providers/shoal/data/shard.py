"""Define `DataShard`: the rows of a dataset that one worker of a training reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.gang_position import GangPosition
from shoal.data.planning import Shard
from shoal.data.spec import TorchDefaults
from shoal.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from shoal.data.ingest import Ingester
    from shoal.data.torch.dataset import TorchDataset


class DataShard:
    """Rows of a dataset that one worker reads, with methods that return these rows as tables or as a torch dataset.

    Args:
        ingester: Reader of the rows.
        shard: Row ranges of this worker.
        position: Rank of the worker and size of its gang.
        largest: Number of rows in the largest shard of all workers; by default, the number of rows in this shard.
        torch_defaults: Default values of arguments of :meth:`to_torch_dataset`.
    """

    def __init__(
        self,
        ingester: Ingester,
        shard: Shard,
        position: GangPosition,
        largest: int | None = None,
        torch_defaults: TorchDefaults | None = None,
    ) -> None:
        self.ingester = ingester
        self.shard = shard
        self.position = position
        self.largest = shard.rows if largest is None else largest
        self.torch_defaults = torch_defaults or TorchDefaults()

    def __repr__(self) -> str:
        return f"DataShard(rank={self.position.rank} of {self.position.world_size}, rows={self.shard.rows})"

    def num_rows(self) -> int:
        """Return the number of rows of this worker."""
        return self.shard.rows

    def iter_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read this worker's rows and yield one table per row range (rows of one row group)."""
        return self.ingester.iter_batches(self.shard, columns)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read all rows of this worker into one Arrow table."""
        return self._read(columns, None)

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Read this worker's rows into a pandas DataFrame, with the index and types that pandas has stored."""
        from shoal.data.parquet.pandas_frames import to_frame

        return to_frame(self._read(None, limit), self.ingester.source)

    def _read(self, columns: Sequence[str] | None, limit: int | None) -> pa.Table:
        from shoal.data.checks import check_same_schema
        from shoal.data.parquet.reading import take_rows

        source = self.ingester.source
        check_same_schema(source, columns)
        return take_rows(self.iter_batches(columns), limit)

    def to_huggingface_dataset(
        self,
        *,
        streaming: bool = False,
        limit: int | None = None,
        batch_size: int = 1024,
        shuffle: bool = False,
        drop_last_batch: bool = False,
    ) -> Any:
        """Return this worker's rows as a dataset of Hugging Face's library `datasets`.

        The arguments are those of :meth:`shoal.data.DataConnector.to_huggingface_dataset`.

        Raises:
            MissingExtraError: The library `datasets` is not installed.
        """
        from shoal.data.huggingface import huggingface_dataset

        return huggingface_dataset(
            self.ingester,
            self.shard,
            self.position.seed,
            streaming=streaming,
            limit=limit,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last_batch=drop_last_batch,
        )

    def to_torch_dataset(
        self,
        batch_size: int | None = None,
        shuffle: bool = False,
        drop_last_batch: bool | None = None,
        columns: Sequence[str] | None = None,
        pad: bool = True,
        expand_dims: bool | None = None,
    ) -> TorchDataset:
        """Return a torch ``IterableDataset`` of this worker's rows.

        Raises:
            DataError: If a column is missing, has a type that torch does not support, or differs between files, or if
                the dataset has no rows.
        """
        try:
            from shoal.data.torch.dataset import TorchDataset
        except ImportError as exc:
            raise MissingExtraError("torch", "torch") from exc
        defaults = self.torch_defaults
        return TorchDataset(
            self.ingester,
            self.shard.ranges,
            self.largest if pad else self.shard.rows,
            self.position,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last_batch=defaults.drop_last_batch if drop_last_batch is None else drop_last_batch,
            columns=columns,
            expand_dims=defaults.expand_dims if expand_dims is None else expand_dims,
        )
