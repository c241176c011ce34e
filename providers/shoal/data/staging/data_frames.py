"""Write DataFrames of pandas, Polars, Snowpark, PySpark and others to Parquet files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.data.ingest import connected_ray
from shoal.data.libraries import need
from shoal.data.parquet.footers import wrap_read_errors
from shoal.data.parquet.listing import check_parents
from shoal.data.parquet.paths import is_local, join, resolve
from shoal.data.parquet.source import ParquetSource
from shoal.data.staging.staged_data import group_rows, staged, table_writer, write_batches
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

_TO_ARROW = ("toArrow", "__arrow_c_stream__", "to_arrow")
"""Names of the methods that convert a DataFrame to Arrow, the preferred one first: of PySpark, of all libraries that
support Arrow's PyCapsule interface, and of Snowpark. PySpark has the second, too, but it fails for timestamps (4.3)."""
_TO_PANDAS = ("to_pandas", "toPandas")


def stage_dataframe(frame: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Write a DataFrame or table to a Parquet file in a new staging directory, one row group at a time.

    Raises:
        DataError: If a column cannot be written, such as a column with values of different types, or the location is
            not writable.
        InvalidArgumentError: If `frame` is not a table.
    """
    need("pyarrow", "numpy")
    import pyarrow as pa

    with staged(staging_location) as directory:
        if _is_pandas(frame):
            frame = _pandas_reader(frame)
        elif not isinstance(frame, pa.Table):
            if not is_frame(frame):
                raise InvalidArgumentError(f"df must be a DataFrame or a pyarrow Table, not {type(frame).__name__}")
            frame = _converted(frame)
        schema, rows, size, slices = frame if isinstance(frame, tuple) else _table_reader(frame)
        step = group_rows(rows, size / max(rows, 1))
        with table_writer(join(directory, "part-00000.parquet"), schema) as writer:
            for start in range(0, rows, step):
                writer.write_table(slices(start, min(start + step, rows)), row_group_size=step)
    return directory


def _converted(frame: Any) -> Any:
    """Convert a DataFrame of Polars, Snowpark, PySpark or others to an Arrow table or, through pandas, to the result of
    `_pandas_reader`."""
    import pyarrow as pa

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


def _table_reader(table: pa.Table) -> tuple[Any, int, int, Any]:
    return table.schema, table.num_rows, table.nbytes, lambda start, stop: table.slice(start, stop - start)


def _pandas_reader(frame: Any) -> tuple[Any, int, int, Any]:
    import pyarrow as pa

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
    return schema, len(frame), _dense_bytes(frame, sparse), convert


def _dense(frame: Any, sparse: Mapping[str, Any]) -> Any:
    """Return a pandas DataFrame whose sparse columns are dense, because Arrow cannot read sparse columns."""
    here = [name for name in frame.columns if name in sparse]
    return frame.assign(**{name: frame[name].sparse.to_dense() for name in here}) if here else frame


def _dense_bytes(frame: Any, sparse: Mapping[str, Any]) -> int:
    dense = frame.drop(columns=list(sparse)) if sparse else frame
    row_bytes: int = sum(subtype.itemsize for subtype in sparse.values())
    return int(dense.memory_usage(index=False).sum()) + len(frame) * row_bytes


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
    import pyarrow as pa

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

    Raises:
        InvalidArgumentError: If `dataset` is not a ``pyarrow.dataset.Dataset``.
        DataError: If the files belong to a Delta, Iceberg or Hudi table, and were not listed by the table's library.
    """
    import pyarrow.dataset as pads
    from pyarrow.fs import LocalFileSystem

    if not isinstance(dataset, pads.Dataset):
        raise InvalidArgumentError(f"dataset must be a pyarrow.dataset.Dataset, not {type(dataset).__name__}")
    if not isinstance(dataset, pads.FileSystemDataset) or not isinstance(dataset.format, pads.ParquetFileFormat):
        return None
    _refuse_tables(dataset)
    # A dataset with a filter cannot be read directly. `Dataset.filter()` stores the filter's expression in the private
    # attribute `_scan_options`, and no public attribute shows whether a dataset has a filter.
    if not isinstance(dataset.filesystem, LocalFileSystem) or getattr(dataset, "_scan_options", True):
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


def _refuse_tables(dataset: pyarrow.dataset.Dataset) -> None:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    filesystem = dataset.filesystem
    # The library of a table brings its own filesystem, and its dataset contains only the files that belong to the
    # table. A dataset that Arrow itself has made of the table's folder also contains deleted files.
    if isinstance(filesystem, PyFileSystem) and not isinstance(filesystem.handler, FSSpecHandler):
        return
    check_parents(filesystem, (file.rpartition("/")[0] for file in dataset.files))


def stage_arrow_dataset(dataset: pyarrow.dataset.Dataset, staging_location: str | os.PathLike[str] | None) -> str:
    """Write the rows of an Arrow dataset to a Parquet file in a new staging directory, without loading all rows into
    memory.

    Raises:
        DataError: If a file cannot be read, or the location is not writable.
    """
    # Reading ahead is limited to one batch. By default Arrow accumulates batches and takes up to ten times the memory
    # of a reader that does not read ahead (arrow#39808).
    with staged(staging_location) as directory, wrap_read_errors("the dataset"):
        batches = dataset.to_batches(batch_readahead=1, fragment_readahead=1)
        write_batches(batches, dataset.schema, join(directory, "part-00000.parquet"))
    return directory


def stage_ray_dataset(dataset: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Run a Ray Data pipeline and write its rows to Parquet files in a new staging directory.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidArgumentError: If this process is not connected to Ray, or if no location was given and the nodes are on
            several hosts.
        DataError: If the location is not writable.
    """
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
