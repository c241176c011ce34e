"""Write and remove staged data: Parquet files that shoal writes for the workers.

A directory of staged data contains a marker file, which names the process that holds the data, and a file for each job
that uses them. It is removed when no process holds the data and no job uses them any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filesystems import is_local, join, normalise, resolve
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

    from shoal.state.process import ProcessId

# Name of the file that marks a directory as created by shoal. shoal removes only directories that contain this file.
# The name begins with an underscore, so that readers of the data skip it. The file contains the process that holds the
# data, as JSON: {"process": {...}}, or {"process": null} after that process has released them.
MARKER = "_shoal_staging"

# As long as a job uses the data, their directory contains an empty file for this job. The name of the file is this
# text, followed by the id under which the attempt of the job was submitted.
_USED_BY = "_shoal_used_by."

# These numbers decide the size of a row group, the unit in which rows are assigned to workers. With 64 row groups, even
# 16 workers get four each. A row group has at least 8 Ki rows, because smaller ones compress badly and make the footer
# large. It has at most 32 MiB after decoding, which limits the memory that a worker needs while it reads.
_GROUPS = 64
_MIN_GROUP_ROWS = 8_192
_MAX_GROUP_BYTES = 32 * 2**20

_TO_ARROW = ("to_arrow", "toArrow")
"""Names of the method that returns a frame as a ``pyarrow.Table``: in Snowpark (and Polars), and in PySpark."""

_GLOB = "*?[]"
"""Characters that fsspec interprets as a pattern when it removes a directory; URIs that contain them are refused."""


def default_location() -> str:
    """Return the default staging location: ``$SHOAL_HOME/staging``, or ``~/.shoal/staging`` without ``SHOAL_HOME``."""
    home = os.environ.get("SHOAL_HOME") or "~/.shoal"
    return str(Path(home).expanduser().absolute() / "staging")


@contextlib.contextmanager
def staged(staging_location: str | os.PathLike[str] | None = None, name: str | None = None) -> Iterator[str]:
    """Create a directory for one staged dataset. If the ``with`` block raises an exception, remove the directory.

    Args:
        staging_location: Directory or URI in which to create the directory; :func:`default_location` if None.
        name: Name of the new directory; a random one if None.

    Yields:
        Path or URI of the new directory.

    Raises:
        InvalidArgumentError: If the URI contains a wildcard character, because then fsspec could not remove the staged
            data.
        DataError: If the location is not writable.
    """
    import pyarrow as pa

    base = default_location() if staging_location is None else normalise(staging_location)
    if not is_local(base) and any(character in base for character in _GLOB):
        raise InvalidArgumentError(
            f"staging_location {base} contains one of the characters {_GLOB}: use a URI without these characters"
        )
    directory = join(base, name or uuid.uuid4().hex)
    try:
        if is_local(directory):
            # With mode 700, other users of this host cannot read the staged rows.
            Path(base).mkdir(parents=True, exist_ok=True, mode=0o700)
            Path(directory).mkdir(mode=0o700)
        filesystem, inner = resolve(directory)
        filesystem.create_dir(inner, recursive=True)
        _write_holder(filesystem, inner, _this_process())
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as exc:
        # ValueError is caught, too, because Python raises it for a path that contains a NUL character.
        raise DataError(
            f"data cannot be staged in {base}: {exc}; pass staging_location= with a writable directory or URI"
        ) from None
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError, DataError):
            discard(directory)
        raise


def claim(location: str, user: str) -> None:
    """Note in a directory of staged data that a job uses it.

    Args:
        location: Directory or URI that :func:`staged` created.
        user: Id under which the attempt of the job is submitted.

    Raises:
        DataError: If the directory was removed.
    """
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    # Object stores have no directories. There, the claim alone would make a directory that is never removed.
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
        raise DataError(f"the staged data in {location} do not exist any more: stage them again")
    with filesystem.open_output_stream(f"{inner}/{_USED_BY}{user}"):
        pass


def claims(location: str) -> set[str]:
    """Return the ids of the attempts that use a directory of staged data."""
    from pyarrow.fs import FileSelector

    filesystem, inner = resolve(normalise(location))
    found = filesystem.get_file_info(FileSelector(inner, allow_not_found=True))
    return {file.base_name.removeprefix(_USED_BY) for file in found if file.base_name.startswith(_USED_BY)}


def unclaim(location: str, user: str) -> None:
    """Note in a directory of staged data that a job does not use it any more."""
    filesystem, inner = resolve(normalise(location))
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(f"{inner}/{_USED_BY}{user}")


def release(location: str) -> bool:
    """Note in a directory of staged data that its process does not hold the data any more, and remove the directory
    unless a job uses it.

    Returns:
        True if the directory was removed.
    """
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
        return False
    # This process first notes in the marker file that it does not hold the data any more, and then looks for jobs that
    # use them. A job that ends at the same time first removes its claim, and then reads the marker file. So at least
    # one of the two sees that the data are unused, and removes the directory.
    _write_holder(filesystem, inner, None)
    return discard_unused(location)


def hand_over(location: str) -> None:
    """Leave a directory of staged data to the process that will submit a job with it.

    The marker file then names no process, so the directory stays until a job that uses it has ended.
    """
    filesystem, inner = resolve(normalise(location))
    with filesystem.open_output_stream(f"{inner}/{MARKER}"):
        pass


def discard_unused(location: str) -> bool:
    """Remove a directory of staged data if no process holds the data and no job uses them.

    Returns:
        True if the directory was removed.

    Raises:
        InvalidArgumentError: If the directory exists, but has no marker file.
    """
    return not is_held(location) and not claims(location) and discard(location)


def is_held(location: str, *, unknown: bool = False) -> bool:
    """Return whether the process that holds a directory of staged data runs, or may run on another host.

    Args:
        location: Directory or URI that :func:`staged` created.
        unknown: Result if the marker file does not exist, or was written by a version of shoal that did not name the
            process.
    """
    filesystem, inner = resolve(normalise(location))
    try:
        with filesystem.open_input_stream(f"{inner}/{MARKER}") as stream:
            process = json.loads(stream.read())["process"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return unknown
    from shoal.state.process import ProcessId

    return process is not None and not ProcessId.from_json(process).known_dead()


def _write_holder(filesystem: FileSystem, inner: str, process: ProcessId | None) -> None:
    with filesystem.open_output_stream(f"{inner}/{MARKER}") as stream:
        stream.write(json.dumps({"process": process.to_json() if process else None}).encode())


def _this_process() -> ProcessId:
    from shoal.state.process import ProcessId

    return ProcessId.mine()


def discard(location: str) -> bool:
    """Remove a directory that shoal created for staged data, even if it is still used.

    Args:
        location: Directory or URI that :func:`staged` created.

    Returns:
        True if the directory was removed, False if it did not exist.

    Raises:
        InvalidArgumentError: If :func:`staged` did not create the directory. Nothing is removed in this case.
    """
    from pyarrow.fs import FileSelector, FileType

    filesystem, inner = resolve(normalise(location))
    directory, marker = filesystem.get_file_info([inner, f"{inner}/{MARKER}"])
    if directory.type == FileType.NotFound:
        return False
    if marker.type == FileType.NotFound:
        raise InvalidArgumentError(
            f"{location} was not staged by shoal: it is not removed, because it has no file {MARKER}"
        )
    # The marker file is removed last. If this process is killed before that, the next call of this function still finds
    # the marker file, and removes the rest.
    for found in filesystem.get_file_info(FileSelector(inner)):
        if found.type == FileType.Directory:
            filesystem.delete_dir(found.path)
        elif found.base_name != MARKER:
            filesystem.delete_file(found.path)
    filesystem.delete_dir(inner)
    return True


def group_rows(rows: int, bytes_per_row: float) -> int:
    """Compute the number of rows per row group, from the dataset's number of rows and the size of a row.

    Args:
        rows: Number of rows in the dataset.
        bytes_per_row: Decoded size of a row in bytes.

    Returns:
        Number of rows per row group, so that there are enough row groups to assign evenly to workers and that a decoded
        row group has at most 32 MiB.
    """
    most = max(1, int(_MAX_GROUP_BYTES / max(bytes_per_row, 1.0)))
    return min(most, max(_MIN_GROUP_ROWS, -(-rows // _GROUPS)))


class TableWriter:
    """Writer that appends tables with the same schema to one Parquet file. As a context manager, it closes the file.

    Args:
        path: File to write.
        schema: Columns of the file.

    Raises:
        DataError: If several columns have the same name.
    """

    def __init__(self, path: str, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        names = schema.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f'the data has several columns named "{name}": rename all but one')
        filesystem, inner = resolve(path)
        self._stack = contextlib.ExitStack()
        stream = self._stack.enter_context(filesystem.open_output_stream(inner))
        self._writer = self._stack.enter_context(pq.ParquetWriter(stream, schema, compression="zstd"))

    def write(self, table: pa.Table, row_group_rows: int) -> None:
        """Append a table to the file, divided into row groups of `row_group_rows` rows."""
        self._writer.write_table(table, row_group_size=row_group_rows)

    def close(self) -> None:
        """Write the Parquet footer and close the file."""
        self._stack.close()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def stage_dataframe(frame: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Write a DataFrame or table to a Parquet file in a new staging directory, one row group at a time.

    Args:
        frame: pandas DataFrame (its index is left out), ``pyarrow.Table``, or another object that :func:`is_frame`
            accepts.
        staging_location: Directory or URI in which to create a directory; :func:`default_location` if None.

    Returns:
        Path or URI of the new directory.

    Raises:
        DataError: If a column cannot be written, such as a column with values of different types, or the location is
            not writable.
        InvalidArgumentError: If `frame` is not a table.
    """
    import pyarrow as pa

    with staged(staging_location) as directory:
        if _is_pandas(frame):
            frame = _pandas_reader(frame)
        elif not isinstance(frame, pa.Table):
            if not is_frame(frame):
                raise InvalidArgumentError(f"df must be a DataFrame or a pyarrow Table, not {type(frame).__name__}")
            to_arrow = _method_to_arrow(frame)
            with _converting():
                frame = pa.table(frame if to_arrow is None else to_arrow())
        schema, rows, size, slices = frame if isinstance(frame, tuple) else _table_reader(frame)
        step = group_rows(rows, size / max(rows, 1))
        with TableWriter(join(directory, "part-00000.parquet"), schema) as writer:
            for start in range(0, rows, step):
                writer.write(slices(start, min(start + step, rows)), step)
    return directory


def is_frame(value: Any) -> bool:
    """Return whether :func:`stage_dataframe` accepts an object: one with ``__arrow_c_stream__``, or with a method
    ``to_arrow()`` or ``toArrow()``, such as the DataFrames of Snowpark and PySpark."""
    return not isinstance(value, type) and (hasattr(value, "__arrow_c_stream__") or _method_to_arrow(value) is not None)


def _method_to_arrow(frame: Any) -> Callable[[], Any] | None:
    """Return the method that converts a frame to Arrow; None if Arrow can read the frame itself, or there is none."""
    if hasattr(frame, "__arrow_c_stream__"):
        return None
    return next((method for name in _TO_ARROW if callable(method := getattr(frame, name, None))), None)


def _is_pandas(frame: Any) -> bool:
    # A pandas DataFrame is recognised by the name of its class, because isinstance() would need an import of pandas,
    # which is slow, and unnecessary for all other frames.
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
            raise DataError(f'the data has several columns named "{name}": rename all but one')
    frame = frame.set_axis(columns, axis=1)

    def convert(start: int, stop: int) -> Any:
        with _converting():
            return pa.Table.from_pandas(frame.iloc[start:stop], schema=schema, preserve_index=False)

    # The columns are converted one at a time, because Arrow's error message does not name the column that cannot be
    # converted.
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
        # All arguments of the exception are shown, because pandas adds a text with the column's name as the second
        # argument: "Conversion failed for column x with type object".
        raise DataError(f"{what} cannot be written as Parquet: {'; '.join(map(str, exc.args))}") from exc


def write_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: str) -> None:
    """Write record batches with the same schema to a Parquet file. Only one row group is in memory at a time.

    Args:
        batches: Record batches to write.
        schema: Schema of the batches.
        path: File or URI to write.
    """
    import pyarrow as pa

    kept: list[pa.RecordBatch] = []
    rows = size = 0
    with TableWriter(path, schema) as writer:
        for batch in batches:
            kept.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            # The total number of rows is not known yet, so group_rows() cannot be used. Instead, row groups get a size
            # that suits a medium-sized dataset.
            if rows >= 4 * _MIN_GROUP_ROWS or size >= _MAX_GROUP_BYTES:
                writer.write(pa.Table.from_batches(kept, schema), rows)
                kept, rows, size = [], 0, 0
        if rows:
            writer.write(pa.Table.from_batches(kept, schema), rows)
