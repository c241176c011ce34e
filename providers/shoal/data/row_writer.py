"""Write rows of any source to a Parquet file for the workers. The row groups follow from the rows alone, so that equal
rows in equal order give equal row groups, and so equal shards and models, whatever library they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from shoal.data.filters import check_unique
from shoal.data.parquet.files import join, resolve
from shoal.data.parquet.footers import open_parquet
from shoal.data.parquet.rows_digest import STORED, RowsDigest, is_list, kind_of
from shoal.errors import DataError
from shoal.lazy_imports import np, pa, pc, pq

# A row group is the unit in which rows are assigned to workers, and the unit that a worker decodes at a time. Smaller
# ones compress badly and make the footer large.
GROUP_ROWS = 32_768
"""Largest number of rows of a row group."""
GROUP_BYTES = 32 * 2**20
"""Largest size of the values of a row group, as `_row_bytes` counts them. A larger row is a row group of its own."""


def write_rows(batches: Iterable[pa.RecordBatch], schema: pa.Schema, directory: str, number: int = 0) -> int:
    """Write record batches to a Parquet file in a directory, together with the fingerprint of the rows.

    Only the batch and one row group are in memory at a time.

    Returns:
        Number of rows.
    """
    stored = {key: text for key, text in (schema.metadata or {}).items() if key != STORED}
    schema = schema.with_metadata(stored or None)
    digest, rows = RowsDigest(schema), 0
    check_unique(schema.names)
    filesystem, inner = resolve(join(directory, _name(number)))
    with (
        filesystem.open_output_stream(inner) as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        for group in _row_groups(batches, schema):
            writer.write_table(group, row_group_size=group.num_rows)
            digest.add(group)
            rows += group.num_rows
        writer.add_key_value_metadata({STORED: digest.hexdigest()})
    return rows


def write_tables(tables: Iterable[pa.Table], directory: str) -> int:
    """Write tables, whose columns may be of wider types in later tables, to a Parquet file in a directory.

    The file is begun again with each wider type, and at the end all rows are written with the widest.

    Returns:
        Number of rows.
    """
    schemas: list[pa.Schema] = []
    rows = 0
    for schema, part in groupby(_widened(tables), key=itemgetter(0)):
        batches = (batch for _, table in part for batch in table.to_batches())
        rows += write_rows(batches, schema, directory, len(schemas))
        schemas.append(schema)
    if len(schemas) > 1:

        def again() -> Iterator[pa.RecordBatch]:
            for i in range(len(schemas)):
                with open_parquet(join(directory, _name(i))) as (file, _):
                    for batch in file.iter_batches(batch_size=GROUP_ROWS):
                        yield from _cast(pa.Table.from_batches([batch]), schemas[-1]).to_batches()

        write_rows(again(), schemas[-1], directory, len(schemas))
        filesystem, inner = resolve(directory)
        for i in range(len(schemas)):
            filesystem.delete_file(f"{inner}/{_name(i)}")
    return rows


def _name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _widened(tables: Iterable[pa.Table]) -> Iterator[tuple[pa.Schema, pa.Table]]:
    """Yield each table, cast to the types that hold the values of all tables so far, with its new schema."""
    schema: pa.Schema | None = None
    for table in tables:
        with _one_type():
            schema = pa.unify_schemas([*([schema] if schema else []), table.schema], promote_options="permissive")
        yield schema, _cast(table, schema)


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    with _one_type():
        return table.cast(schema)


@contextlib.contextmanager
def _one_type() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise DataError(
            f"a column has values of different types: {exc}; convert it to one type, in a query with CAST"
        ) from exc


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Divide rows into row groups: each has as many rows as the two limits allow, whatever the sizes of the batches."""
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in _slices(batches):
        ends = np.cumsum(np.broadcast_to(_row_bytes(batch.to_struct_array()), batch.num_rows))
        start = 0
        while start < batch.num_rows:
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + GROUP_BYTES - size, side="right"))
            stop = min(start + GROUP_ROWS - rows, max(fitting, start + (not kept)))
            if stop == start:
                yield pa.Table.from_batches(kept, schema)
                kept, rows, size = [], 0, 0
                continue
            kept.append(batch.slice(start, stop - start))
            rows, size = rows + stop - start, size + int(ends[stop - 1]) - before
            start = stop
    if kept:
        yield pa.Table.from_batches(kept, schema)


def _row_bytes(values: pa.Array) -> np.ndarray | int:
    """Return the size of each value of an array, or the size of all if it is the same.

    The size does not depend on the width of a number or on how Arrow stores a text, because both differ between the
    libraries that the rows may come from: a number has 8 bytes, and a text its bytes in UTF-8.
    """
    types, type_ = pa.types, values.type
    if isinstance(values, pa.ExtensionArray):
        return _row_bytes(values.storage)
    if types.is_dictionary(type_):
        return _row_bytes(values.dictionary_decode())
    if types.is_struct(type_):
        return sum(map(_row_bytes, values.flatten()), start=0)
    if types.is_map(type_):
        values = values.cast(pa.list_(pa.struct([("key", type_.key_type), ("value", type_.item_type)])))
    if is_list(values.type):
        lengths, sizes = _integers(pc.list_value_length(values)), _row_bytes(values.flatten())
        if isinstance(sizes, int):
            total: np.ndarray = lengths * sizes
            return total
        ends = np.concatenate([[0], np.cumsum(sizes)])
        sums = ends[np.concatenate([[0], np.cumsum(lengths)])]
        between: np.ndarray = sums[1:] - sums[:-1]
        return between
    if wide := {"text": pa.large_string(), "bytes": pa.large_binary()}.get(kind_of(type_)):
        return _integers(pc.binary_length(values.cast(wide)))
    return max(8, int(type_.bit_width) // 8) if types.is_primitive(type_) or types.is_fixed_size_binary(type_) else 8


def _integers(lengths: pa.Array) -> np.ndarray:
    found: np.ndarray = lengths.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _slices(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, GROUP_ROWS):
            yield batch.slice(start, GROUP_ROWS)
