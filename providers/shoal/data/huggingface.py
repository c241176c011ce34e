"""Return rows as a dataset of Hugging Face's library `datasets`: in memory, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_same_schema
from shoal.data.parquet.reading import take_rows
from shoal.data.planning import Shard
from shoal.errors import InvalidArgumentError, MissingExtraError

if TYPE_CHECKING:
    from shoal.data.ingest import Ingester
    from shoal.data.planning import RowRange

# Number of rows from which a stream draws the next one at random, at least; the default value of `datasets`.
_SHUFFLED_ROWS = 1_000


def huggingface_dataset(
    ingester: Ingester,
    shard: Shard,
    seed: int,
    *,
    streaming: bool,
    limit: int | None,
    batch_size: int,
    shuffle: bool,
    drop_last_batch: bool,
) -> Any:
    """Return the rows of a shard as a ``datasets.Dataset``, or as a ``datasets.IterableDataset`` with `streaming`.

    The other arguments are those of :meth:`shoal.data.DataConnector.to_huggingface_dataset`.

    Raises:
        MissingExtraError: The library `datasets` is not installed.
        InvalidArgumentError: `limit` is negative, or `batch_size` is not positive.
    """
    try:
        import datasets
    except ImportError as exc:
        raise MissingExtraError("datasets", None) from exc
    rows = _rows(shard.rows, limit, batch_size if drop_last_batch else 1)
    source = ingester.source
    schema = source.schema()
    check_same_schema(source, None)
    if not streaming:
        tables = ingester.iter_batches(shard)
        dataset = datasets.Dataset(take_rows(tables, None if shuffle else rows) if rows else schema.empty_table())
        return dataset.shuffle(seed=seed).select(range(rows)) if shuffle else dataset
    if source.staged_copy is not None:
        # The stream reads the files when the connector may no longer exist, also in workers of a DataLoader.
        source.staged_copy.keep()
    # `datasets` divides the items of a list among the nodes and workers that read the stream.
    ranges = list(shard.ranges)
    stream = datasets.IterableDataset.from_generator(
        _rows_of, features=datasets.Features.from_arrow_schema(schema), gen_kwargs={"by": ingester, "of": ranges}
    )
    if shuffle:
        stream = stream.shuffle(seed=seed, buffer_size=max(batch_size, _SHUFFLED_ROWS))
    return stream.take(rows) if rows < shard.rows else stream


def _rows(rows: int, limit: int | None, multiple_of: int) -> int:
    """Return how many of the rows the dataset has."""
    if limit is not None and limit < 0:
        raise InvalidArgumentError(f"limit must not be negative, but is {limit}")
    if multiple_of < 1:
        raise InvalidArgumentError(f"batch_size must be a positive integer, not {multiple_of!r}")
    rows -= rows % multiple_of
    return rows if limit is None else min(limit, rows)


def _rows_of(by: Ingester, of: Sequence[RowRange]) -> Iterator[dict[str, Any]]:
    for table in by.iter_batches(Shard(tuple(of))):
        for batch in table.to_batches(max_chunksize=_SHUFFLED_ROWS):
            yield from batch.to_pylist()
