"""Read Parquet footers, and compute fingerprints of datasets from footers.

The footers are sufficient to assign rows to workers and to check columns: no row has to be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.data.connections import refusal
from shoal.data.listing import DataFile
from shoal.data.parquet.files import in_threads, resolve
from shoal.errors import DataAccessError, DataError
from shoal.lazy_imports import np, pa, pq

_MAGIC = b"PAR1"
# Arrow, too, reads so many bytes at the end of a file first, because they contain most footers.
_TAIL_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Footer:
    """Size, schema, row groups and partition values of one Parquet file, as read from its footer and path.

    Args:
        path: Canonical path or URI.
        size: Size of the file in bytes.
        groups: (number of rows, uncompressed bytes) of each row group.
        schema: The columns in the file, without metadata. For a file of a table: in the table's names and types.
        partitions: (name, value) of each partition; see `DataFile`.
        fingerprint: Hash of the bytes of the footer.
        stored: For a file of a table, the names in the file of the columns of `schema`; None if they are the same, and
            the types, too.
        deleted: Positions of the deleted rows of the file; see `DataFile`.
    """

    path: str
    size: int
    groups: tuple[tuple[int, int], ...]
    schema: pa.Schema
    partitions: tuple[tuple[str, Any], ...]
    fingerprint: str = ""
    stored: tuple[str, ...] | None = None
    deleted: np.ndarray | None = field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Return the number of rows in the file."""
        return sum(rows for rows, _ in self.groups)

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names that columns have in the file."""
        if self.stored is None:
            return list(names)
        return [self.stored[self.schema.get_field_index(name)] for name in names]

    def deleted_in(self, row_group: int) -> np.ndarray:
        """Return the positions of the deleted rows of a row group, counted from its first row, ascending."""
        if self.deleted is None:
            return np.arange(0)
        start = sum(rows for rows, _ in self.groups[:row_group])
        first, after = np.searchsorted(self.deleted, (start, start + self.groups[row_group][0]))
        positions: np.ndarray = self.deleted[first:after].astype(np.int64) - start
        return positions


@contextlib.contextmanager
def wrap_read_errors(path: str, part: str = "") -> Iterator[None]:
    """Convert an exception that Arrow raises while reading a file to a DataError that names the file."""
    try:
        yield
    except (MemoryError, DataError):
        raise
    except FileNotFoundError:
        raise DataAccessError(
            f"{path} is gone, but was there when the files of the dataset were listed: create the dataset again"
        ) from None
    except PermissionError as exc:
        raise DataAccessError(f"{path} cannot be read: {exc.strerror or exc}") from None
    except (OSError, pa.ArrowException) as exc:
        what = f"{path}, {part}," if part else path
        # Arrow raises OSError mostly if the storage does not answer, but also for some corrupt files.
        kind = DataAccessError if isinstance(exc, OSError) else DataError
        first_line = next(iter(str(exc).splitlines()), type(exc).__name__)
        raise refusal(path, exc) or kind(f"{what} is corrupt or not a Parquet file: {first_line}") from None


@contextlib.contextmanager
def open_planned(footer: Footer, buffer_size: int = 0) -> Iterator[Any]:
    """Open a Parquet file whose footer was read before, and check that the file is still the same.

    If the file was replaced after its rows were assigned to workers, rows could be lost, read twice or mixed with rows
    that nobody has checked.
    """
    with open_parquet(footer.path, of_table=footer.stored is not None, buffer_size=buffer_size) as (file, fingerprint):
        if fingerprint != footer.fingerprint:
            rows = file.metadata.num_rows
            raise changed(
                footer, "another footer now" if rows == footer.rows else f"{footer.rows} rows then, {rows} now"
            )
        yield file


def changed(footer: Footer, how: str) -> DataError:
    """Return the error for a file that was changed after its footer had been read."""
    return DataAccessError(
        f"{footer.path} was changed after shoal had read its footer ({how}): create a new connector, run the program "
        "again, and write new data only to new files"
    )


@contextlib.contextmanager
def open_parquet(path: str, *, of_table: bool = False, buffer_size: int = 0) -> Iterator[tuple[Any, str]]:
    """Open a Parquet file for reading, and yield it with the fingerprint of its footer."""
    # As nanoseconds, which are Arrow's default for the INT96 of Spark, times outside the years 1677 to 2262 are wrong.
    # Folders of Parquet files keep the type that they have always had.
    options: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"} if of_table else {}
    if buffer_size:
        # Without a buffer, Arrow reads whole column chunks before it decodes the first batch.
        options["buffer_size"] = buffer_size
    filesystem, inner = resolve(path)
    with contextlib.ExitStack() as stack:
        with wrap_read_errors(path):
            handle = stack.enter_context(filesystem.open_input_file(inner))
            footer = _footer_bytes(handle)
            # The footer is not read a second time. If it is not one, ParquetFile reads the file and raises the error.
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer)) if footer else None
            file = stack.enter_context(pq.ParquetFile(handle, metadata=metadata, pre_buffer=False, **options))
        yield file, hashlib.sha256(footer).hexdigest()[:32]


def _footer_bytes(handle: Any) -> bytes:
    """Read the footer of an open file: the metadata, its length (4 bytes) and the magic number. Return no bytes if the
    file does not end with a footer."""
    size = handle.size()
    tail: bytes = handle.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != _MAGIC or length + len(_MAGIC) > size:
        return b""
    return tail[-length:] if length <= len(tail) else handle.read_at(length, size - length)


def stored_description(stored: Any) -> dict[str, Any]:
    """Return the description of a DataFrame that pandas has written; an empty dict without one.

    Args:
        stored: Metadata of a Parquet file, or a schema.
    """
    text = (stored.metadata or {}).get(b"pandas")
    described: dict[str, Any] = json.loads(text) if text else {}
    return described


def read_footers(files: Sequence[DataFile], table: pa.Schema | None = None) -> tuple[list[Footer], dict[str, Any]]:
    """Read the footers of several Parquet files in parallel threads.

    Args:
        files: The files.
        table: Columns of the table to which the files belong; None if they belong to no table.
    """
    schemas: dict[Any, Any] = {}

    def read(file: DataFile) -> tuple[Footer, Any]:
        if file.size == 0:
            raise DataError(f"{file.path} is corrupt or not a Parquet file: it is empty (0 bytes)")
        with open_parquet(file.path) as (parquet, fingerprint), wrap_read_errors(file.path):
            metadata = parquet.metadata
            schema, stored = parquet.schema_arrow.remove_metadata(), None
        if table is not None:
            schema, stored = _of_table(schema, table, file)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        # The files of a dataset usually have the same schema. Footers with equal schemas share one schema object, so
        # that a pickled `ParquetSource` is small.
        schema, stored = schemas.setdefault((schema, stored), (schema, stored))
        sizes = tuple((group.num_rows, group.total_byte_size) for group in groups)
        partitions = tuple(file.partitions.items())
        return Footer(file.path, file.size, sizes, schema, partitions, fingerprint, stored, file.deleted), metadata

    results = in_threads("footers", read, files)
    return [footer for footer, _ in results], {footer.path: metadata for footer, metadata in results}


def _of_table(schema: pa.Schema, table: pa.Schema, file: DataFile) -> tuple[pa.Schema, tuple[str, ...]]:
    """Return those columns of a table that one of its files stores, and their names in the file."""
    has_no_ids = all(field_id(column) is None for column in schema)
    if has_no_ids and any((column.metadata or {}).get(NAMES_IN_FILES) == b"null" for column in table):
        raise DataError(
            f"{file.path} has no field ids, and the table has no property schema.name-mapping.default, which says "
            "which columns the file contains: set the property, or rewrite the file with rewrite_data_files"
        )
    index_of = index_in_file(schema)
    fields, names = [], []
    for column in table:
        at = index_of(column)
        # The partition value holds, and is known without reading, even if the file stores the column, too.
        if at is not None and column.name not in file.partitions:
            fields.append(column)
            names.append(schema.names[at])
    return pa.schema(fields), tuple(names)


FIELD_ID = b"PARQUET:field_id"
"""Key of the metadata in which a field has its id, in files and in the schema of a table."""
NAMES_IN_FILES = b"shoal.names_in_files"
"""Key of the metadata in which a field of a table has its names in files without field ids: a JSON list, or null if
such files cannot be read."""
DELTA_NAME = b"delta.columnMapping.physicalName"
"""Key of the metadata in which a field of a Delta table has its name in files without field ids."""


def field_id(field: pa.Field) -> int | None:
    """Return the Parquet field id of a column; None if it has none."""
    text = (field.metadata or {}).get(FIELD_ID)
    return None if text is None else int(text)


def index_in_file(stored: Iterable[pa.Field]) -> Callable[[pa.Field], int | None]:
    """Return a function that returns the index of a table's field among the fields of a file; None if the file lacks
    the field.

    The field is found by its id if the file has field ids, else by its names in files.
    """
    fields = list(stored)
    ids = {field_id(field): i for i, field in enumerate(fields)}
    names = {field.name: i for i, field in enumerate(fields)}
    has_ids = any(each is not None for each in ids)

    def find(field: pa.Field) -> int | None:
        if has_ids and (wanted := field_id(field)) is not None:
            return ids.get(wanted)
        metadata = field.metadata or {}
        known = json.loads(metadata[NAMES_IN_FILES]) if NAMES_IN_FILES in metadata else None
        given = known if known is not None else [metadata.get(DELTA_NAME, field.name.encode()).decode()]
        return next((names[name] for name in given if name in names), None)

    return find


def footer_texts(footer: Footer, metadata: Any) -> Iterator[str]:
    """Yield the texts from a file's footer that determine the file's fingerprint: sizes, schema, statistics, and
    for a file of a folder partition values.
    """
    schema, partitions = footer.schema, footer.partitions
    if footer.stored is not None:
        # Names, comments and types of the table change without the file.
        schema, partitions = metadata.schema.to_arrow_schema().remove_metadata(), ()
    yield repr((footer.size, footer.groups, partitions, str(schema)))
    for row_group in range(metadata.num_row_groups):
        group = metadata.row_group(row_group)
        for chunk in map(group.column, range(group.num_columns)):
            text = f"{chunk.path_in_schema}:{chunk.total_compressed_size}:{chunk.total_uncompressed_size}"
            stats = chunk.statistics if chunk.is_stats_set else None
            if stats is not None and stats.has_min_max:
                text += f":{stats.null_count}:{stats.min_raw!r}:{stats.max_raw!r}"
            yield text


def texts_digest(texts: Iterable[str]) -> str:
    """Compute a fingerprint of 32 hex digits from texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:32]
