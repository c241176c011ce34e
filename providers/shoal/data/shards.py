"""Define the shard of a dataset: the rows that one worker reads, as tables or as a dataset of torch or Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_same_schema
from shoal.data.dataset_spec import TorchDefaults
from shoal.data.ingest import Ingester
from shoal.data.parquet.reading import take_rows
from shoal.data.planning import GangPosition, RowRange, Shard
from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.lazy_imports import pa, pd

if TYPE_CHECKING:
    from shoal.data.torch_dataset import TorchDataset

# Number of rows from which a stream draws the next one at random, at least; the default value of `datasets`.
_SHUFFLED_ROWS = 1_000


def _rows_of(by: Ingester, of: Sequence[RowRange]) -> Iterator[dict[str, Any]]:
    for table in by.iter_batches(Shard(tuple(of))):
        for batch in table.to_batches(max_chunksize=_SHUFFLED_ROWS):
            yield from batch.to_pylist()


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
        from shoal.data.output_tables import to_frame

        return to_frame(self._read(None, limit), self.ingester.source)

    def _read(self, columns: Sequence[str] | None, limit: int | None) -> pa.Table:
        check_same_schema(self.ingester.source, columns)
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
            InvalidArgumentError: `limit` is negative, or `batch_size` is not positive.
        """
        try:
            import datasets
        except ImportError as exc:
            raise MissingExtraError("datasets", None) from exc
        if limit is not None and limit < 0:
            raise InvalidArgumentError(f"limit must not be negative, but is {limit}")
        multiple_of = batch_size if drop_last_batch else 1
        if multiple_of < 1:
            raise InvalidArgumentError(f"batch_size must be a positive integer, not {multiple_of!r}")
        rows = self.shard.rows - self.shard.rows % multiple_of
        if limit is not None:
            rows = min(limit, rows)
        source, seed = self.ingester.source, self.position.seed
        check_same_schema(source, None)
        # Files that `datasets` has written name the columns that are pictures or names of classes.
        stored = source.metadata(source.reference().path).metadata or {}
        schema = source.schema().with_metadata({key: text for key, text in stored.items() if key == b"huggingface"})
        if not streaming:
            tables = self.iter_batches()
            table = take_rows(tables, None if shuffle else rows) if rows else schema.empty_table()
            dataset = datasets.Dataset(table.replace_schema_metadata(schema.metadata))
            return dataset.shuffle(seed=seed).select(range(rows)) if shuffle else dataset
        if source.staged_copy is not None:
            # The stream reads the files when the connector may no longer exist, also in workers of a DataLoader.
            source.staged_copy.keep()
        # `datasets` divides the items of a list among the nodes and workers that read the stream.
        stream = datasets.IterableDataset.from_generator(
            _rows_of,
            features=datasets.Features.from_arrow_schema(schema),
            gen_kwargs={"by": self.ingester, "of": list(self.shard.ranges)},
        )
        if shuffle:
            stream = stream.shuffle(seed=seed, buffer_size=max(batch_size, _SHUFFLED_ROWS))
        return stream.take(rows) if rows < self.shard.rows else stream

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
            from shoal.data.torch_dataset import TorchDataset
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
