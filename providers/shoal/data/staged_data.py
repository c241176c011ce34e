"""Write DataFrames and datasets of Arrow and Ray to Parquet files for the workers (staged data), record which processes
and jobs use the files, and remove them.

A directory of staged data contains a marker file, which names the process that uses the data, and a file for each job
that uses the data. The directory is removed when neither a process nor a job uses the data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shoal.data.ingest import connected_ray
from shoal.data.parquet.files import check_parents, is_local, join, need, normalise, resolve
from shoal.data.parquet.footers import wrap_read_errors
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataAccessError, DataError, InvalidArgumentError
from shoal.lazy_imports import pa, pq
from shoal.new_files import create_folder
from shoal.os_processes import ProcessId

if TYPE_CHECKING:
    import pyarrow.dataset
    from pyarrow.fs import FileSystem


# Name of the marker file in each directory that shoal creates for staged data. shoal removes only directories that
# contain this file. The name begins with an underscore, so that readers of the data skip the file. The file contains
# the process that uses the data, as JSON: {"process": {...}}, or {"process": null} after this process has released the
# data.
MARKER = "_shoal_staging"

# Prefix of the names of empty files in a directory of staged data. Each file represents an attempt of a job that uses
# the data, and the rest of its name is the id of the attempt. The file is removed when the attempt ends.
_USED_BY = "_shoal_used_by."


def claim(location: str, user: str) -> None:
    """Record in a directory of staged data that a job uses the data."""
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    # Object stores have no real directories. Without this check, writing the file would create the removed directory
    # again, and it would never be removed.
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
        raise DataError(
            f"the staged data in {location} do not exist any more: stage them again by creating the connector again"
        )
    with filesystem.open_output_stream(f"{inner}/{_USED_BY}{user}"):
        pass


def claims(location: str) -> set[str]:
    """Return the ids of the attempts that use a directory of staged data."""
    from pyarrow.fs import FileSelector

    filesystem, inner = resolve(normalise(location))
    found = filesystem.get_file_info(FileSelector(inner, allow_not_found=True))
    return {file.base_name.removeprefix(_USED_BY) for file in found if file.base_name.startswith(_USED_BY)}


def unclaim(location: str, user: str) -> None:
    """Record in a directory of staged data that a job no longer uses the data."""
    filesystem, inner = resolve(normalise(location))
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(f"{inner}/{_USED_BY}{user}")


def release(location: str) -> bool:
    """Record in a directory of staged data that this process no longer uses the data, and remove the directory if no
    job uses it.
    """
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
        return False
    # This process first records in the marker file that it no longer uses the data, and then looks for jobs that use
    # the data. A job that ends at the same time first removes its own file, and then reads the marker file. Therefore
    # at least one of the two finds that the data is unused, and removes the directory.
    _write_holder(filesystem, inner, None)
    return discard_unused(location)


def hand_over(location: str) -> None:
    """Keep a directory of staged data after the end of this process, because another process will submit a job with
    this data.

    The marker file then names no process, so the directory stays until a job has used the data and ended.
    """
    filesystem, inner = resolve(normalise(location))
    with filesystem.open_output_stream(f"{inner}/{MARKER}"):
        pass


def discard_unused(location: str) -> bool:
    """Remove a directory of staged data if neither a process nor a job uses the data."""
    return not is_held(location) and not claims(location) and discard(location)


def is_held(location: str, *, unknown: bool = False) -> bool:
    """Return whether the process that uses a directory of staged data is running, or may be running on another host."""
    filesystem, inner = resolve(normalise(location))
    try:
        with filesystem.open_input_stream(f"{inner}/{MARKER}") as stream:
            process = json.loads(stream.read())["process"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return unknown
    return process is not None and not ProcessId.from_json(process).known_dead()


def _write_holder(filesystem: FileSystem, inner: str, process: ProcessId | None) -> None:
    with filesystem.open_output_stream(f"{inner}/{MARKER}") as stream:
        stream.write(json.dumps({"process": process.to_json() if process else None}).encode())


def discard(location: str) -> bool:
    """Remove a directory that shoal created for staged data, even if a process or a job still uses the data."""
    from pyarrow.fs import FileSelector, FileType

    filesystem, inner = resolve(normalise(location))
    directory, marker = filesystem.get_file_info([inner, f"{inner}/{MARKER}"])
    if directory.type == FileType.NotFound:
        return False
    if marker.type == FileType.NotFound:
        raise InvalidArgumentError(
            f"{location} was not staged by shoal and is not removed, because it contains no file {MARKER}"
        )
    # The marker file is removed last. If this process is killed before the end, the next call of this function still
    # finds the marker file, and removes the rest.
    for found in filesystem.get_file_info(FileSelector(inner)):
        if found.type == FileType.Directory:
            filesystem.delete_dir(found.path)
        elif found.base_name != MARKER:
            filesystem.delete_file(found.path)
    filesystem.delete_dir(inner)
    return True


_GLOB = "*?[]"
"""Characters that fsspec interprets as a pattern when it removes a directory. URIs that contain these characters are
refused."""


def default_location() -> str:
    """Return the default staging location: ``$SHOAL_HOME/staging``, or ``~/.shoal/staging`` without ``SHOAL_HOME``."""
    home = os.environ.get("SHOAL_HOME") or "~/.shoal"
    return str(Path(home).expanduser().absolute() / "staging")


@contextlib.contextmanager
def staged(staging_location: str | os.PathLike[str] | None = None, name: str | None = None) -> Iterator[str]:
    """Create a directory for one staged dataset, and remove the directory if the ``with`` block raises an exception."""
    need("pyarrow", "numpy")
    base = default_location() if staging_location is None else normalise(staging_location)
    if not is_local(base) and any(character in base for character in _GLOB):
        raise InvalidArgumentError(
            f"staging_location {base} contains one of the characters {_GLOB}: use a URI without these characters"
        )
    directory = join(base, name or uuid.uuid4().hex)
    try:
        if is_local(directory):
            # With mode 700, other users of this host cannot read the staged rows.
            create_folder(Path(base))
            Path(directory).mkdir(mode=0o700)
        filesystem, inner = resolve(directory)
        filesystem.create_dir(inner, recursive=True)
        _write_holder(filesystem, inner, ProcessId.mine())
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as exc:
        # ValueError is also caught, because Python raises it for a path that contains a NUL character.
        raise DataAccessError(
            f"data cannot be staged in {base}: {exc}; pass staging_location= with a writable directory or URI"
        ) from None
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError, DataError):
            discard(directory)
        raise


log = logging.getLogger(__name__)

_kept: list[StagedCopy] = []

_WRITTEN, _SUBMITTED = "written as JSON", "submitted"


class StagedCopy:
    """Reference of this process to a staged copy of data: Parquet files that shoal wrote for the workers.

    The sources of connectors and the specs of datasets refer to this object. The copy is removed when the last of these
    sources and specs is deleted, or when the process exits. If a job still uses the copy, the copy is removed when the
    job ends. If a spec was written as JSON but not submitted, another process may submit the spec later. The copy is
    then kept until a job has used it.

    Args:
        location: Directory or URI of the copy.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._uses: set[str] = set()
        self._release = weakref.finalize(self, _release, location, os.getpid(), self._uses)

    def __eq__(self, other: object) -> bool:
        # pydantic compares two specs with this method, too. Specs with equal fields must be equal, even if only one of
        # them refers to a staged copy.
        return other is None or isinstance(other, StagedCopy)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled connector or spec contains None instead of this object, so that another process does not remove the
        # data.
        return type(None), ()

    def discard(self) -> bool:
        """Remove the staged copy of the data now; return False if the copy no longer existed."""
        self._release.detach()
        return discard(self.location)

    def written(self) -> None:
        """Record that a spec with this staged copy was written as JSON. The copy is then kept for the process that
        submits the spec."""
        self._uses.add(_WRITTEN)

    def submitted(self) -> None:
        """Record that this process has submitted a job with this staged copy. The copy is then removed when the job no
        longer uses it."""
        self._uses.add(_SUBMITTED)

    def keep(self) -> None:
        """Keep the staged copy of the data until this process exits."""
        _kept.append(self)


def _release(location: str, pid: int, uses: set[str]) -> None:
    # A forked child process also runs this finalizer, but only the process that created the StagedCopy may release the
    # data.
    if os.getpid() != pid:
        return
    try:
        if uses == {_WRITTEN}:
            hand_over(location)
        else:
            release(location)
    except Exception as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)


# These numbers determine the size of a row group, the unit in which rows are assigned to workers. With 64 row groups,
# each of 16 workers gets four row groups. A row group has at least 8 Ki rows, because smaller row groups compress badly
# and make the footer large. A row group has at most 32 MiB after decoding, which limits the memory that a worker needs
# while it reads.
_GROUPS = 64
_MIN_GROUP_ROWS = 8_192
_MAX_GROUP_BYTES = 32 * 2**20


def group_rows(rows: int, bytes_per_row: float) -> int:
    """Compute the number of rows per row group, from the dataset's number of rows and the size of a row."""
    most = max(1, int(_MAX_GROUP_BYTES / max(bytes_per_row, 1.0)))
    return min(most, max(_MIN_GROUP_ROWS, -(-rows // _GROUPS)))


@contextlib.contextmanager
def table_writer(path: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Open a Parquet file for writing. The file is complete after the ``with`` block."""
    names = schema.names
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'the data has several columns named "{name}": rename all but one')
    filesystem, inner = resolve(path)
    with (
        filesystem.open_output_stream(inner) as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        yield writer


def write_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: str) -> None:
    """Write record batches with the same schema to a Parquet file. Only one row group is in memory at a time."""
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    with table_writer(path, schema) as writer:
        for batch in batches:
            kept.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            # The total number of rows is unknown, so group_rows() cannot be used. Instead, row groups get a size that
            # suits a dataset of medium size.
            if rows >= 4 * _MIN_GROUP_ROWS or size >= _MAX_GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(kept, schema), row_group_size=rows)
                kept, rows, size = [], 0, 0
        if rows:
            writer.write_table(pa.Table.from_batches(kept, schema), row_group_size=rows)


_TO_ARROW = ("toArrow", "__arrow_c_stream__", "to_arrow")
"""Names of the methods that convert a DataFrame to Arrow, the preferred one first: of PySpark, of all libraries that
support Arrow's PyCapsule interface, and of Snowpark. PySpark has the second, too, but it fails for timestamps (4.3)."""
_TO_PANDAS = ("to_pandas", "toPandas")


def stage_dataframe(frame: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Write a DataFrame or table to a Parquet file in a new staging directory, one row group at a time."""
    need("pyarrow", "numpy")
    with staged(staging_location) as directory:
        if _is_pandas(frame):
            frame = _pandas_reader(frame)
        elif not isinstance(frame, pa.Table):
            if not is_frame(frame):
                raise InvalidArgumentError(f"df must be a DataFrame or a pyarrow Table, not {type(frame).__name__}")
            frame = _converted(frame)
        if isinstance(frame, tuple):
            schema, rows, size, slices = frame
        else:
            schema, rows, size = frame.schema, frame.num_rows, frame.nbytes
            slices = lambda start, stop: frame.slice(start, stop - start)  # noqa: E731
        step = group_rows(rows, size / max(rows, 1))
        with table_writer(join(directory, "part-00000.parquet"), schema) as writer:
            for start in range(0, rows, step):
                writer.write_table(slices(start, min(start + step, rows)), row_group_size=step)
    return directory


def _converted(frame: Any) -> Any:
    """Convert a DataFrame of Polars, Snowpark, PySpark or others to an Arrow table or, through pandas, to the result of
    `_pandas_reader`."""
    name = _to_arrow(frame)
    table = frame if name is None or name.startswith("_") else getattr(frame, name)()
    if not isinstance(table, pa.Table | pa.RecordBatch) and not hasattr(table, "__arrow_c_stream__"):
        # Snowpark's local testing returns a list of rows from to_arrow().
        to_pandas = next((getattr(frame, name) for name in _TO_PANDAS if callable(getattr(frame, name, None))), None)
        result = None if to_pandas is None else to_pandas()
        if _is_pandas(result):
            return _pandas_reader(result)
        raise InvalidArgumentError(
            f"the method to_arrow() of the {type(frame).__name__} returned a {type(table).__name__} instead of a "
            "pyarrow Table: convert the data to a pandas DataFrame or a pyarrow Table first"
        )
    with _converting():
        return pa.table(table)


def is_frame(value: Any) -> bool:
    """Return whether :func:`stage_dataframe` accepts an object as a table.

    The object must have ``__arrow_c_stream__``, or a method ``to_arrow()`` or ``toArrow()``, like the DataFrames of
    Snowpark and PySpark.
    """
    return not isinstance(value, type) and _to_arrow(value) is not None


def _to_arrow(frame: Any) -> str | None:
    """Return the name of the method that converts a DataFrame to Arrow, or None if it has none."""
    return next((name for name in _TO_ARROW if callable(getattr(frame, name, None))), None)


def _is_pandas(frame: Any) -> bool:
    # A pandas DataFrame is recognised by the name of its class, because isinstance() would need an import of pandas,
    # which is slow and not necessary for other DataFrames.
    return any(
        base.__module__.split(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(frame).__mro__
    )


def _pandas_reader(frame: Any) -> tuple[Any, int, int, Any]:
    columns = [str(name) for name in frame.columns]
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f'the data has several columns named "{name}": rename all but one')
    frame = frame.set_axis(columns, axis=1)
    frame.attrs = {}

    def convert(start: int, stop: int) -> Any:
        with _converting():
            return pa.Table.from_pandas(_dense(frame.iloc[start:stop], sparse), schema=schema, preserve_index=False)

    # The columns are converted one at a time, because Arrow's error message does not name the column that cannot be
    # converted.
    schema = pa.schema([])
    dtypes = dict(frame.dtypes)
    sparse = {name: dtype.subtype for name, dtype in dtypes.items() if type(dtype).__name__ == "SparseDtype"}
    for name in columns:
        _check_pandas_type(name, dtypes[name])
        with _converting(name):
            schema = schema.append(pa.Schema.from_pandas(_dense(frame[[name]], sparse), preserve_index=False).field(0))
    # pandas' types, such as Int64, are stored in the file, so that `to_pandas` restores them.
    schema = convert(0, 0).schema
    dense = frame.drop(columns=list(sparse)) if sparse else frame
    row_bytes = sum(subtype.itemsize for subtype in sparse.values())
    return schema, len(frame), int(dense.memory_usage(index=False).sum()) + len(frame) * row_bytes, convert


def _dense(frame: Any, sparse: Mapping[str, Any]) -> Any:
    """Return a pandas DataFrame whose sparse columns are dense, because Arrow cannot read sparse columns."""
    here = [name for name in frame.columns if name in sparse]
    return frame.assign(**{name: frame[name].sparse.to_dense() for name in here}) if here else frame


def _check_pandas_type(column: str, dtype: Any) -> None:
    """Raise DataError if Parquet has no type for a pandas type. Arrow would raise an error without the column's name,
    or write a type that only a process with pandas can read."""
    advice = {
        "IntervalDtype": "replace it by its bounds (.left and .right of its values), or by numbers or text",
        "PeriodDtype": "convert it to timestamps (.dt.to_timestamp()), numbers or text",
    }
    categories = getattr(dtype, "categories", None)
    for each in (dtype, getattr(categories, "dtype", None)):
        kind = type(each).__name__
        if getattr(each, "kind", "") == "c":
            text = "write its real and its imaginary part into two columns"
        elif kind in advice:
            text = advice[kind]
        else:
            continue
        raise DataError(
            f'column "{column}" of the DataFrame is of type {dtype}, which cannot be written as Parquet: {text}'
        )


@contextlib.contextmanager
def _converting(column: str | None = None) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as exc:
        what = f'column "{column}" of the DataFrame' if column else "the DataFrame"
        # All arguments of the exception are shown, because pandas adds a text with the column's name as the second
        # argument: "Conversion failed for column x with type object".
        reason = "; ".join(map(str, exc.args))
        raise DataError(f"{what} cannot be written as Parquet: {reason}; convert the values to one type first") from exc


def source_in_place(dataset: pyarrow.dataset.Dataset) -> ParquetSource | None:
    """Return a source that reads the files of an Arrow dataset directly, or None if the rows have to be copied.

    Returns:
        A source for the files; None if the files have other rows or columns than the dataset, or are not local Parquet
        files.
    """
    import pyarrow.dataset as pads
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    if not isinstance(dataset, pads.Dataset):
        raise InvalidArgumentError(f"dataset must be a pyarrow.dataset.Dataset, not {type(dataset).__name__}")
    if not isinstance(dataset, pads.FileSystemDataset) or not isinstance(dataset.format, pads.ParquetFileFormat):
        return None
    # The library of a table brings its own filesystem, and its dataset contains only the files that belong to the
    # table. A dataset that Arrow itself has made of the table's folder also contains deleted files.
    filesystem = dataset.filesystem
    if not isinstance(filesystem, PyFileSystem) or isinstance(filesystem.handler, FSSpecHandler):
        check_parents(filesystem, (file.rpartition("/")[0] for file in dataset.files))
    # A dataset with a filter cannot be read directly. `Dataset.filter()` stores the filter's expression in the private
    # attribute `_scan_options`, and no public attribute shows whether a dataset has a filter.
    if not isinstance(filesystem, LocalFileSystem) or getattr(dataset, "_scan_options", True):
        return None
    if not dataset.files:
        return None
    source = ParquetSource(dataset.files)
    try:
        # A dataset may contain only some row groups of a file, so the row groups are compared. The numbers of rows
        # cannot be compared, because `count_rows()` counts all rows of the file.
        groups = sum(fragment.num_row_groups for fragment in dataset.get_fragments())
        same = groups == len(source.row_groups()) and source.schema() == dataset.schema.remove_metadata()
    except DataError:
        return None
    return source if same else None


def stage_arrow_dataset(dataset: pyarrow.dataset.Dataset, staging_location: str | os.PathLike[str] | None) -> str:
    """Write the rows of an Arrow dataset to a Parquet file in a new staging directory, without loading all rows into
    memory.
    """
    # Reading ahead is limited to one batch. By default Arrow accumulates batches and takes up to ten times the memory
    # of a reader that does not read ahead (arrow#39808).
    with staged(staging_location) as directory, wrap_read_errors("the dataset"):
        batches = dataset.to_batches(batch_readahead=1, fragment_readahead=1)
        write_batches(batches, dataset.schema, join(directory, "part-00000.parquet"))
    return directory


def stage_ray_dataset(dataset: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Run a Ray Data pipeline and write its rows to Parquet files in a new staging directory."""
    with staged(staging_location) as directory:
        ray = connected_ray()
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        if is_local(directory) and len(hosts) > 1 and staging_location is None:
            raise InvalidArgumentError(
                f"the pool's nodes are on {len(hosts)} hosts, which do not share the directory "
                f"{os.path.dirname(directory)}: pass staging_location= with a directory or URI that all hosts can reach"
            )
        filesystem, inner = resolve(directory)
        dataset.write_parquet(inner, filesystem=filesystem, try_create_dir=False, compression="zstd")
    return directory
