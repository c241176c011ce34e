"""Divide rows into buckets on disk, and read the rows of one bucket. All rows of a partition are in one bucket.

Each chunk of the dataset becomes one file in Arrow's IPC format, with a record batch for each bucket and for each 64
MiB of the chunk. Unlike a Parquet file, which repeats the description of every column in every row group, such a file
opens in a fraction of a millisecond, however many batches it has. An index in JSON, which is written last, says which
batch belongs to which bucket, and that the file is complete.

Chunks and buckets depend only on the dataset, so that another attempt, with another number of workers, can use what an
earlier one has written.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.data.parquet.files import is_local, resolve
from shoal.data.parquet.schema import plain_type
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowGroup, RowRange, gathered, range_of
from shoal.kinds.partitions.keys import Key, bucket_of, encoded, key_text
from shoal.lazy_imports import np, pa
from shoal.new_files import complete_file

_MOST_CHUNKS = 64
"""Number of chunks into which a dataset with many row groups is divided. Each worker that processes a bucket opens the
files of all chunks."""

_LEAST_CHUNK_ROWS = 100_000
"""Rows that a chunk has at least, if the dataset has so many. A file of fewer rows costs more to open than to read."""

_BUCKET_ROWS = 20_000
_LEAST_BUCKETS, _MOST_BUCKETS = 32, 1024
"""Rows of a bucket for which the number of buckets is chosen, and the limits of this number. The buckets are units of
work, so there have to be many more than workers; each costs about 5 ms."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that one worker reads and divides together: whole row groups that follow each other.

    Args:
        number: Number of the chunk, from 0, in the order of the dataset.
        ranges: The rows.
    """

    number: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the chunk."""
        return sum(part.rows for part in self.ranges)


def chunks_of(row_groups: Sequence[RowGroup]) -> tuple[Chunk, ...]:
    """Divide the row groups of a dataset into chunks, in the order of the dataset."""
    least = max(_LEAST_CHUNK_ROWS, -(-sum(group.rows for group in row_groups) // _MOST_CHUNKS))
    ranges = [range_of(group) for group in row_groups if group.rows]
    return tuple(Chunk(number, tuple(together)) for number, together in enumerate(gathered(ranges, least)))


def number_of_buckets(rows: int) -> int:
    """Return the number of buckets for a dataset with so many rows."""
    return min(max(rows // _BUCKET_ROWS, _LEAST_BUCKETS), _MOST_BUCKETS)


def largest_first(rows: Mapping[int, int]) -> list[int]:
    """Return the buckets in the order in which they are processed, from the number of rows of each bucket."""
    return sorted((bucket for bucket in rows if rows[bucket]), key=lambda bucket: (-rows[bucket], bucket))


def dealt(rows: Mapping[int, int], num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Assign items, such as buckets, to workers: the largest first, each to the worker with the fewest rows so far."""
    loads = [(0, rank) for rank in range(num_workers)]
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for item in largest_first(rows):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + rows[item], rank))
    return tuple(map(tuple, shares))


SPILL_BYTES = 64 * 2**20
"""Bytes of rows after which a worker writes the rows that it has read. A worker needs about three times as much memory,
besides one decoded row group."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Place of a part of a bucket's rows: a record batch of the file of a chunk.

    Args:
        chunk: Number of the chunk.
        index: Index of the record batch in the file.
        rows: Number of rows.
        size_bytes: Size of the rows in memory.
    """

    chunk: int
    index: int
    rows: int
    size_bytes: int


def rows_path(folder: str, chunk: int) -> str:
    """Return the path of the file with the rows of a chunk."""
    return f"{folder}/rows-{chunk:05d}.arrow"


def index_path(folder: str, chunk: int) -> str:
    """Return the path of the index of a chunk."""
    return f"{folder}/rows-{chunk:05d}.json"


def write_chunk(
    source: ParquetSource, chunk: Chunk, columns: Sequence[str], by: Sequence[str], buckets: int, folder: str
) -> None:
    """Read the rows of a chunk, divide them into buckets, and write them into a file of the folder."""
    filesystem, root = resolve(folder)
    names, types = list(dict.fromkeys((*columns, *by))), source.schema()
    # Plain values in the place of dictionaries, of which a file could have only one per column, and of views, which
    # Arrow cannot reorder.
    schema = pa.schema([(name, plain_type(types.field(name).type)) for name in names])
    index: list[tuple[int, int, int]] = []
    numbers: dict[Key, int] = {}
    options = pa.ipc.IpcWriteOptions(compression="lz4" if pa.Codec.is_available("lz4") else None, use_threads=False)
    with (
        complete_file(filesystem, rows_path(root, chunk.number), is_local=is_local(folder)) as stream,
        pa.ipc.new_file(stream, schema, options=options) as writer,
    ):
        for table in _gathered(source.read(chunk.ranges, names), schema):
            for bucket, batch in _divided(table, by, buckets, numbers):
                writer.write_batch(batch)
                index.append((bucket, batch.num_rows, batch.nbytes))
    with complete_file(filesystem, index_path(root, chunk.number), is_local=is_local(folder)) as stream:
        stream.write(json.dumps({"rows": chunk.rows, "batches": index}).encode())


def _gathered(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of tables in tables of about `SPILL_BYTES`."""
    pending: list[pa.Table] = []
    for table in tables:
        table = table.cast(schema)
        step = max(1, SPILL_BYTES * table.num_rows // max(1, table.nbytes))
        for start in range(0, table.num_rows, step):
            pending.append(table.slice(start, step))
            if sum(each.nbytes for each in pending) >= SPILL_BYTES:
                yield pa.concat_tables(pending)
                pending = []
    if pending:
        yield pa.concat_tables(pending)


def _divided(
    table: pa.Table, by: Sequence[str], buckets: int, numbers: dict[Key, int]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each bucket in a table, in the order of the table. `numbers` has the buckets of known keys."""
    codes, keys = encoded(table, by)
    for key in keys:
        if key not in numbers:
            numbers[key] = bucket_of(key_text(key), buckets)
    bucket_of_row = np.array([numbers[key] for key in keys], np.int64)[codes]
    order = np.argsort(bucket_of_row, kind="stable")
    table = table.take(order)
    found, starts = np.unique(bucket_of_row[order], return_index=True)
    stops = [*starts[1:].tolist(), table.num_rows]
    for bucket, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True):
        # One record batch that has only its own rows.
        rows = table.slice(start, stop - start)
        (batch,) = rows.combine_chunks().to_batches() or rows.schema.empty_table().to_batches()
        yield bucket, batch


def read_index(folder: str, chunk: Chunk) -> list[tuple[int, BatchInfo]] | None:
    """Return the bucket and the place of each batch of a chunk; None if the file of the chunk is not complete."""
    filesystem, root = resolve(folder)
    path = index_path(root, chunk.number)
    try:
        with filesystem.open_input_file(path) as file:
            document = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None
    if document["rows"] != chunk.rows:
        return None
    return [
        (bucket, BatchInfo(chunk.number, index, rows, size))
        for index, (bucket, rows, size) in enumerate(document["batches"])
    ]


@dataclass
class BucketReader:
    """Reader of the rows of buckets. It keeps the files of the chunks open.

    Args:
        folder: Folder of the files.
        types: Type of each column in the dataset, by name; dictionaries are restored to these types.
    """

    folder: str
    types: Mapping[str, pa.DataType]
    _readers: dict[int, Any] = field(default_factory=dict)

    def table(self, batches: Sequence[BatchInfo], mask_of: Mapping[BatchInfo, np.ndarray] | None = None) -> pa.Table:
        """Read batches, in their order, into one table.

        Args:
            batches: Places of the batches.
            mask_of: Positions of the rows to keep in each batch; None: all rows.
        """
        tables = []
        for batch in batches:
            table = pa.Table.from_batches([self._file(batch.chunk).get_batch(batch.index)])
            tables.append(table if mask_of is None else table.take(mask_of[batch]))
        return self.typed(pa.concat_tables(tables))

    def typed(self, table: pa.Table) -> pa.Table:
        """Restore the columns of dictionaries in a table."""
        for place, column in enumerate(table.schema):
            if pa.types.is_dictionary(type_ := self.types[column.name]):
                encoded_column = table.column(place).combine_chunks().dictionary_encode().cast(type_)
                table = table.set_column(place, column.name, encoded_column)
        return table

    def _file(self, chunk: int) -> Any:
        if chunk not in self._readers:
            filesystem, root = resolve(self.folder)
            options = pa.ipc.IpcReadOptions(use_threads=False)
            file = filesystem.open_input_file(rows_path(root, chunk))
            self._readers[chunk] = pa.ipc.open_file(file, options=options)
        return self._readers[chunk]
