"""Connect to `pyarrow.dataset` datasets: read local Parquet files directly, or copy the rows to a staging location."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.data.parquet.footers import wrap_read_errors
from shoal.data.parquet.paths import join
from shoal.data.parquet.source import ParquetSource
from shoal.data.parquet.table_formats import check_parents
from shoal.data.staging.location import staged
from shoal.data.staging.table_writer import write_batches
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow.dataset


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
