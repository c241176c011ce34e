"""Staged data: Parquet written once for workers to read, and removed when its job ends."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filesystems import is_local, join, normalise, resolve
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa

# Marks a directory as ours to remove. Its underscore keeps it out of the data.
MARKER = "_shoal_staging"

# A row group is the unit that is assigned to workers: 64 leave even 16 workers four each, 8 Ki rows keep zstd and the
# footer efficient, and 32 MiB (as decoded) bound what a worker holds while it reads.
_GROUPS = 64
_MIN_GROUP_ROWS = 8_192
_MAX_GROUP_BYTES = 32 * 2**20

_GLOB = "*?[]"
"""Characters that fsspec takes for a pattern when it removes a folder."""


def default_location() -> str:
    """Where data is staged unless it is said otherwise: ``$SHOAL_HOME/staging``, that is, ``~/.shoal/staging``."""
    home = os.environ.get("SHOAL_HOME") or "~/.shoal"
    return str(Path(home).expanduser().absolute() / "staging")


@contextlib.contextmanager
def staged(staging_location: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Makes a new directory to stage one dataset in, and removes it again if writing fails.

    Args:
        staging_location: Directory or URI to make it in; :func:`default_location` if None.

    Yields:
        Path or URI of the new directory.

    Raises:
        InvalidArgumentError: The URI has a character that would keep what was staged from being removed.
        DataError: Nothing can be written there.
    """
    import pyarrow as pa

    base = default_location() if staging_location is None else normalise(staging_location)
    if not is_local(base) and any(character in base for character in _GLOB):
        raise InvalidArgumentError(f"staging_location {base} has one of {_GLOB}: name a URI without")
    directory = join(base, uuid.uuid4().hex)
    try:
        if is_local(directory):
            # The rows are the user's: nobody else on this host needs to see them.
            Path(base).mkdir(parents=True, exist_ok=True, mode=0o700)
            Path(directory).mkdir(mode=0o700)
        filesystem, inner = resolve(directory)
        filesystem.create_dir(inner, recursive=True)
        with filesystem.open_output_stream(f"{inner}/{MARKER}") as stream:
            stream.write(b"Staged by shoal; removed when its job ends.\n")
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as exc:  # a ValueError: a path with a zero byte
        raise DataError(f"nothing can be staged in {base}: {exc}; name another place with staging_location=") from None
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError, DataError):
            discard(directory)
        raise


def discard(location: str) -> bool:
    """Removes staged data.

    Args:
        location: What :func:`staged` made.

    Returns:
        True if something was removed, False if it was gone already.

    Raises:
        InvalidArgumentError: If the directory was not made by :func:`staged`; nothing is removed.
    """
    from pyarrow.fs import FileSelector, FileType

    filesystem, inner = resolve(normalise(location))
    directory, marker = filesystem.get_file_info([inner, f"{inner}/{MARKER}"])
    if directory.type == FileType.NotFound:
        return False
    if marker.type == FileType.NotFound:
        raise InvalidArgumentError(f"{location} was not staged by shoal: it is not removed")
    # The marker goes last: where this process is killed, the next one can remove the rest.
    for found in filesystem.get_file_info(FileSelector(inner)):
        if found.type == FileType.Directory:
            filesystem.delete_dir(found.path)
        elif found.base_name != MARKER:
            filesystem.delete_file(found.path)
    filesystem.delete_dir(inner)
    return True


def group_rows(rows: int, bytes_per_row: float) -> int:
    """How many rows to write per row group.

    Args:
        rows: Rows of the dataset.
        bytes_per_row: Decoded size of a row in bytes.

    Returns:
        Rows per group: enough groups to assign evenly, none too big to hold.
    """
    most = max(1, int(_MAX_GROUP_BYTES / max(bytes_per_row, 1.0)))
    return min(most, max(_MIN_GROUP_ROWS, -(-rows // _GROUPS)))


class TableWriter:
    """Writes tables of one schema into one staged Parquet file.

    Args:
        path: File to write.
        schema: Its columns.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        names = schema.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f'there are several columns called "{name}": rename all but one')
        filesystem, inner = resolve(path)
        self._stack = contextlib.ExitStack()
        stream = self._stack.enter_context(filesystem.open_output_stream(inner))
        self._writer = self._stack.enter_context(pq.ParquetWriter(stream, schema, compression="zstd"))

    def write(self, table: pa.Table, row_group_rows: int) -> None:
        """Appends a table, in row groups of `row_group_rows` rows."""
        self._writer.write_table(table, row_group_size=row_group_rows)

    def close(self) -> None:
        """Writes the footer."""
        self._stack.close()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def stage_dataframe(frame: Any, directory: str) -> str:
    """Writes a DataFrame or table as Parquet, one row group at a time.

    Args:
        frame: pandas DataFrame (its index is left out), ``pyarrow.Table``, or anything with ``__arrow_c_stream__``.
        directory: Where to.

    Returns:
        Path of the file.

    Raises:
        DataError: If a column cannot be written, such as one that mixes types.
        InvalidArgumentError: If it is no table.
    """
    import pyarrow as pa

    path = join(directory, "part-00000.parquet")
    if _is_pandas(frame):
        frame = _pandas_reader(frame)
    elif not isinstance(frame, pa.Table):
        if not hasattr(frame, "__arrow_c_stream__"):
            raise InvalidArgumentError(f"a DataFrame or a pyarrow Table is needed, not {type(frame).__name__}")
        with _converting():
            frame = pa.table(frame)
    schema, rows, size, slices = frame if isinstance(frame, tuple) else _table_reader(frame)
    step = group_rows(rows, size / max(rows, 1))
    with TableWriter(path, schema) as writer:
        for start in range(0, rows, step):
            writer.write(slices(start, min(start + step, rows)), step)
    return path


def _is_pandas(frame: Any) -> bool:
    # Not isinstance: whoever has no pandas frame need not load pandas.
    return any(
        base.__module__.split(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(frame).__mro__
    )


def _table_reader(table: pa.Table) -> tuple[Any, int, int, Any]:
    return table.schema, table.num_rows, table.nbytes, lambda start, stop: table.slice(start, stop - start)


def _pandas_reader(frame: Any) -> tuple[Any, int, int, Any]:
    import pyarrow as pa

    columns = [str(name) for name in frame.columns]
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f'there are several columns called "{name}": rename all but one')
    frame = frame.set_axis(columns, axis=1)

    def convert(start: int, stop: int) -> Any:
        with _converting():
            return pa.Table.from_pandas(frame.iloc[start:stop], schema=schema, preserve_index=False)

    # One column at a time, because Arrow does not name the one that it cannot convert.
    schema = pa.schema([])
    for name in columns:
        with _converting(name):
            schema = schema.append(pa.Schema.from_pandas(frame[[name]], preserve_index=False).field(0))
    return schema, len(frame), int(frame.memory_usage(index=False).sum()), convert


@contextlib.contextmanager
def _converting(column: str | None = None) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as exc:
        what = f'column "{column}" of the DataFrame' if column else "the DataFrame"
        # pandas adds a second argument: "Conversion failed for column x with type object".
        raise DataError(f"{what} cannot be written as Parquet: {'; '.join(map(str, exc.args))}") from exc


def stage_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, directory: str) -> str:
    """Writes record batches of one schema as Parquet, holding one row group at a time.

    Args:
        batches: The rows.
        schema: Their columns.
        directory: Where to.

    Returns:
        Path of the file.
    """
    import pyarrow as pa

    path = join(directory, "part-00000.parquet")
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    with TableWriter(path, schema) as writer:
        for batch in batches:
            kept.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            # How many rows there will be is not known here, so groups are made small enough for a middling dataset.
            if rows >= 4 * _MIN_GROUP_ROWS or size >= _MAX_GROUP_BYTES:
                writer.write(pa.Table.from_batches(kept, schema), rows)
                kept, rows, size = [], 0, 0
        if rows:
            writer.write(pa.Table.from_batches(kept, schema), rows)
    return path
