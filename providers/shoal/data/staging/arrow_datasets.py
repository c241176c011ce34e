"""`pyarrow.dataset` datasets: read where they are if that means the same rows, else staged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.parquet.footers import wrap_read_errors
from shoal.data.parquet.source import ParquetSource
from shoal.data.staging.staged_data import stage_batches
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow.dataset


def source_in_place(dataset: pyarrow.dataset.Dataset) -> ParquetSource | None:
    """Finds out whether a dataset is just its local Parquet files.

    Args:
        dataset: Any Arrow dataset.

    Returns:
        A source over its files, or None if rows or columns would differ or a worker could not open them.
    """
    import pyarrow.dataset as pads
    from pyarrow.fs import LocalFileSystem

    if not isinstance(dataset, pads.Dataset):
        raise InvalidArgumentError(f"a pyarrow.dataset.Dataset is needed, not {type(dataset).__name__}")
    if not isinstance(dataset, pads.FileSystemDataset) or not isinstance(dataset.format, pads.ParquetFileFormat):
        return None
    # `Dataset.filter()` keeps its expression only there.
    if not isinstance(dataset.filesystem, LocalFileSystem) or getattr(dataset, "_scan_options", True):
        return None
    if not dataset.files:
        return None
    source = ParquetSource(dataset.files)
    try:
        # A fragment may have been cut down to some of its row groups (`count_rows()` counts the others too).
        groups = sum(fragment.num_row_groups for fragment in dataset.get_fragments())
        same = groups == len(source.row_groups()) and source.schema() == dataset.schema.remove_metadata()
    except DataError:
        return None
    return source if same else None


def stage(dataset: pyarrow.dataset.Dataset, directory: str) -> None:
    """Streams a dataset's rows to Parquet.

    Args:
        dataset: Any Arrow dataset.
        directory: Where to.
    """
    # Without readahead: a scan accumulates what it has read ahead, up to ten times a reader's memory (arrow#39808).
    with wrap_read_errors("the dataset"):
        batches = dataset.to_batches(batch_readahead=1, fragment_readahead=1)
        stage_batches(batches, dataset.schema, directory)
