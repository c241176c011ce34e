"""Read Parquet footers. The footers are sufficient to assign rows to workers and to check columns: no row has to be
read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filesystems import resolve
from shoal.data.parquet.listing import DataFile, partition_values
from shoal.errors import DataAccessError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

# An object store takes 20 to 100 ms to return a footer, so 16 threads read a thousand footers in a few seconds.
THREADS = 16
"""Number of threads, each of which reads one file at a time."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Size, schema, row groups and partition values of one Parquet file, as read from its footer and path.

    Args:
        path: Canonical path or URI.
        size: Size of the file in bytes.
        groups: (number of rows, uncompressed bytes) of each row group.
        schema: The columns in the file, without metadata.
        partitions: (name, value) of each Hive partition in the path; the value is text, or None for a null.
    """

    path: str
    size: int
    groups: tuple[tuple[int, int], ...]
    schema: pa.Schema
    partitions: tuple[tuple[str, str | None], ...]

    @property
    def rows(self) -> int:
        """Return the number of rows in the file."""
        return sum(rows for rows, _ in self.groups)


@contextlib.contextmanager
def wrap_read_errors(path: str, part: str = "") -> Iterator[None]:
    """Convert an exception that Arrow raises while reading a file to a DataError that names the file.

    Args:
        path: Path of the file, for the message.
        part: Part of the file that is read, such as ``row group 3``, for the message.

    Raises:
        DataError: If the file is gone, cannot be read, or is not a valid Parquet file.
    """
    import pyarrow as pa

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
        raise kind(f"{what} is corrupt or not a Parquet file: {_first_line(exc)}") from None


def _first_line(exc: BaseException) -> str:
    lines = str(exc).splitlines()
    return lines[0] if lines else type(exc).__name__


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a Parquet file for reading, and close it at the end of the ``with`` block.

    Args:
        path: Canonical path or URI.

    Yields:
        A ``pyarrow.parquet.ParquetFile`` that does not read ahead (``pre_buffer=False``). Reading ahead took ten times
        the memory (arrow#39808).

    Raises:
        DataError: If the file is gone or not a Parquet file.
    """
    import pyarrow.parquet as pq

    filesystem, inner = resolve(path)
    with contextlib.ExitStack() as stack:
        with wrap_read_errors(path):
            handle = stack.enter_context(filesystem.open_input_file(inner))
            file = stack.enter_context(pq.ParquetFile(handle, pre_buffer=False))
        yield file


def read_metadata(path: str) -> Any:
    """Read a Parquet file's footer, and return it with all statistics as a ``pyarrow.parquet.FileMetaData``."""
    with open_parquet(path) as file:
        return file.metadata


def read_footers(files: Sequence[DataFile]) -> tuple[list[Footer], dict[str, Any]]:
    """Read the footers of several Parquet files in parallel threads.

    Args:
        files: The files.

    Returns:
        The footers in the order of `files`, and a dict of path -> ``FileMetaData``.

    Raises:
        DataError: If a file is gone, corrupt, empty (0 bytes) or not a Parquet file. The message names the first such
            file.
    """
    schemas: dict[Any, Any] = {}

    def read(file: DataFile) -> tuple[Footer, Any]:
        if file.size == 0:
            raise DataError(f"{file.path} is corrupt or not a Parquet file: it is empty (0 bytes)")
        with open_parquet(file.path) as parquet, wrap_read_errors(file.path):
            metadata = parquet.metadata
            schema = parquet.schema_arrow.remove_metadata()
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        # The files of a dataset usually have the same schema. Footers with equal schemas share one schema object, so
        # that a pickled `ParquetSource` is small.
        schema = schemas.setdefault(schema, schema)
        sizes = tuple((group.num_rows, group.total_byte_size) for group in groups)
        return Footer(file.path, file.size, sizes, schema, tuple(partition_values(file.path).items())), metadata

    if len(files) == 1:
        results = [read(files[0])]
    else:
        with ThreadPoolExecutor(min(THREADS, max(1, len(files))), thread_name_prefix="shoal-footers") as threads:
            results = list(threads.map(read, files))
    return [footer for footer, _ in results], {footer.path: metadata for footer, metadata in results}
