"""Stage the rows of DataFrames, and of datasets of Arrow, Ray and other libraries, batch by batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.data.filters import check_unique
from shoal.data.ingest import connected_ray
from shoal.data.parquet.files import check_parents, is_local, need, resolve
from shoal.data.parquet.footers import wrap_read_errors
from shoal.data.parquet.source import ParquetSource
from shoal.data.row_writer import GROUP_ROWS, write_rows, write_tables
from shoal.data.staged_data import staged
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import fs, pa

if TYPE_CHECKING:
    import pyarrow.dataset

_TO_ARROW = ("toArrow", "__arrow_c_stream__", "to_arrow")
"""Names of the methods that convert a DataFrame to Arrow, the preferred one first: of PySpark, of all libraries that
support Arrow's PyCapsule interface, and of Snowpark. PySpark has the second, too, but it fails for timestamps (4.3)."""
_TO_PANDAS = ("to_pandas", "toPandas")

_STREAMED = ("pandas", "polars", "dask", "datasets")
_PART_ROWS = 8_192
"""Number of rows that are read of a dataset of Hugging Face at a time."""


def stage_dataframe(frame: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Write a DataFrame or table to a Parquet file in a new staging directory, one row group at a time."""
    need("pyarrow", "numpy")
    with staged(staging_location) as directory:
        if not is_frame(frame):
            raise InvalidArgumentError(f"df must be a DataFrame or a pyarrow Table, not {type(frame).__name__}")
        with _converting():
            if (parts := _parts_of(frame)) is not None:
                readers = map(_reader_of, parts)
                write_tables((pa.Table.from_batches(each, each.schema) for each in readers), directory)
            else:
                reader = _reader_of(frame)
                write_rows(reader, reader.schema, directory)
    return directory


def _parts_of(frame: Any) -> Iterable[Any] | None:
    """Return the parts of a dataset that is larger than the memory, in order, as DataFrames or tables; None for other
    datasets.

    Their types are known only when all parts are there: pandas takes them from the values of each part.
    """
    library = _library(frame, "LazyFrame", "DataFrame", "Dataset", "IterableDataset")
    if library == "polars" and hasattr(frame, "collect_batches"):
        parts: Iterable[Any] = frame.collect_batches(maintain_order=True)
        return parts
    if library == "dask":
        return (part.compute() for part in frame.partitions)
    if library == "datasets":
        tables: Iterable[Any] = frame.with_format("arrow").iter(batch_size=_PART_ROWS)
        return tables
    return None


def _reader_of(frame: Any) -> Any:
    """Return a reader of a DataFrame's rows: an object with the schema that yields record batches."""
    if _library(frame, "DataFrame") == "pandas":
        return _PandasReader(frame)
    if hasattr(frame, "fetch_arrow_reader"):
        # DuckDB's __arrow_c_stream__ holds all rows.
        return frame.fetch_arrow_reader(GROUP_ROWS)
    name = _to_arrow(frame)
    table = frame if name is None or name.startswith("_") else getattr(frame, name)()
    if not hasattr(table, "__arrow_c_stream__"):
        # Snowpark's local testing returns a list of rows from to_arrow().
        to_pandas = next((getattr(frame, name) for name in _TO_PANDAS if callable(getattr(frame, name, None))), None)
        result = None if to_pandas is None else to_pandas()
        if _library(result, "DataFrame") == "pandas":
            return _PandasReader(result)
        raise InvalidArgumentError(
            f"the method to_arrow() of the {type(frame).__name__} returned a {type(table).__name__} instead of a "
            "pyarrow Table: convert the data to a pandas DataFrame or a pyarrow Table first"
        )
    return pa.RecordBatchReader.from_stream(table)


def is_frame(value: Any) -> bool:
    """Return whether :func:`stage_dataframe` accepts an object as a table.

    The object must be a DataFrame of pandas, a dataset of Dask or Hugging Face, or have ``__arrow_c_stream__``, or a
    method ``to_arrow()`` or ``toArrow()``, like the DataFrames of Snowpark and PySpark.
    """
    known = _library(value, "LazyFrame", "DataFrame", "Dataset", "IterableDataset") in _STREAMED
    return not isinstance(value, type) and (known or _to_arrow(value) is not None)


def _to_arrow(frame: Any) -> str | None:
    """Return the name of the method that converts a DataFrame to Arrow, or None if it has none."""
    return next((name for name in _TO_ARROW if callable(getattr(frame, name, None))), None)


def _library(frame: Any, *names: str) -> str | None:
    """Return the library that defines the class of an object, if the class has one of these names; else None.

    Classes are recognised by their names, because isinstance() would need an import of the library, which is slow.
    """
    return next((base.__module__.split(".")[0] for base in type(frame).__mro__ if base.__name__ in names), None)


class _PandasReader:
    """Reader of a pandas DataFrame, which converts the rows of one row group at a time.

    Args:
        frame: The DataFrame. Its index is left out.
    """

    def __init__(self, frame: Any) -> None:
        columns = [str(name) for name in frame.columns]
        check_unique(columns)
        self._frame = frame.set_axis(columns, axis=1)
        self._frame.attrs = {}
        dtypes = dict(self._frame.dtypes)
        self._sparse = {name: dtype.subtype for name, dtype in dtypes.items() if type(dtype).__name__ == "SparseDtype"}
        # The columns are converted one at a time, because Arrow's error message does not name the column that cannot be
        # converted.
        self.schema: Any = pa.schema([])
        for name in columns:
            _check_pandas_type(name, dtypes[name])
            with _converting(name):
                column = _dense(self._frame[[name]], self._sparse)
                self.schema = self.schema.append(pa.Schema.from_pandas(column, preserve_index=False).field(0))
        # pandas' types, such as Int64, are stored in the file, so that `to_pandas` restores them.
        self.schema = self._convert(0, 0).schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self._frame), GROUP_ROWS):
            yield from self._convert(start, start + GROUP_ROWS).to_batches()

    def _convert(self, start: int, stop: int) -> pa.Table:
        rows = _dense(self._frame.iloc[start:stop], self._sparse)
        with _converting():
            return pa.Table.from_pandas(rows, schema=self.schema, preserve_index=False)


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
        "complex": "write its real and its imaginary part into two columns",
    }
    categories = getattr(dtype, "categories", None)
    for each in (dtype, getattr(categories, "dtype", None)):
        kind = "complex" if getattr(each, "kind", "") == "c" else type(each).__name__
        if kind in advice:
            raise DataError(
                f'column "{column}" of the DataFrame is of type {dtype}, which cannot be written as Parquet: '
                f"{advice[kind]}"
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

    if not isinstance(dataset, pads.Dataset):
        raise InvalidArgumentError(f"dataset must be a pyarrow.dataset.Dataset, not {type(dataset).__name__}")
    if not isinstance(dataset, pads.FileSystemDataset) or not isinstance(dataset.format, pads.ParquetFileFormat):
        return None
    # The library of a table brings its own filesystem, and its dataset contains only the files that belong to the
    # table. A dataset that Arrow itself has made of the table's folder also contains deleted files.
    filesystem = dataset.filesystem
    if not isinstance(filesystem, fs.PyFileSystem) or isinstance(filesystem.handler, fs.FSSpecHandler):
        check_parents(filesystem, (file.rpartition("/")[0] for file in dataset.files))
    # A dataset with a filter cannot be read directly. `Dataset.filter()` stores the filter's expression in the private
    # attribute `_scan_options`, and no public attribute shows whether a dataset has a filter.
    if not dataset.files or not isinstance(filesystem, fs.LocalFileSystem) or getattr(dataset, "_scan_options", True):
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
        write_rows(batches, dataset.schema, directory)
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
        dataset.write_parquet(
            inner, filesystem=filesystem, try_create_dir=False, compression="zstd", row_group_size=GROUP_ROWS
        )
    return directory
