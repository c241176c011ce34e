"""Parquet footers: all that planning and checking need to know of a file, without reading a row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.filesystems import resolve
from shoal.data.parquet.listing import DataFile, partition_values
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# Footers of object stores come one round trip (20 to 100 ms) at a time; 16 at once read a thousand files in a few
# seconds.
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Footer:
    """What is known of one Parquet file.

    Args:
        path: Canonical path or URI.
        size: Size of the file in bytes.
        groups: (rows, uncompressed bytes) of each row group.
        schema: The columns in the file, without metadata.
        partitions: Hive partition values out of the path, as text.
    """

    path: str
    size: int
    groups: tuple[tuple[int, int], ...]
    schema: pa.Schema
    partitions: tuple[tuple[str, str | None], ...]

    @property
    def rows(self) -> int:
        """Number of rows in the file."""
        return sum(rows for rows, _ in self.groups)


@contextlib.contextmanager
def wrap_read_errors(path: str, part: str = "") -> Iterator[None]:
    """Turns what Arrow raises while it reads a file into an error that names the file (and the part of it)."""
    import pyarrow as pa

    try:
        yield
    except (MemoryError, DataError):
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is gone: it was there when the dataset was listed") from None
    except PermissionError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror or exc}") from None
    except (OSError, pa.ArrowException) as exc:
        what = f"{path}, {part}," if part else path
        raise DataError(f"{what} is corrupt or no Parquet file: {_first_line(exc)}") from None


def _first_line(exc: BaseException) -> str:
    lines = str(exc).splitlines()
    return lines[0] if lines else type(exc).__name__


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Opens a Parquet file and closes it.

    Args:
        path: Canonical path or URI.

    Returns:
        A ``pyarrow.parquet.ParquetFile`` that reads only what it is asked for (``pre_buffer=False``; buffering ahead
        held ten times the memory, arrow#39808).

    Raises:
        DataError: If it is gone or no Parquet file.
    """
    import pyarrow.parquet as pq

    filesystem, inner = resolve(path)
    with contextlib.ExitStack() as stack:
        with wrap_read_errors(path):
            handle = stack.enter_context(filesystem.open_input_file(inner))
            file = stack.enter_context(pq.ParquetFile(handle, pre_buffer=False))
        yield file


def read_metadata(path: str) -> Any:
    """Reads a file's ``pyarrow.parquet.FileMetaData``."""
    with open_parquet(path) as file:
        return file.metadata


def read_footers(files: Sequence[DataFile]) -> tuple[list[Footer], dict[str, Any]]:
    """Reads the footers of all the files, several at a time.

    Args:
        files: The files; an empty one (0 bytes) is refused.

    Returns:
        The footers in the order of `files`, and each path's ``FileMetaData``.

    Raises:
        DataError: For the first file that is gone, corrupt or no Parquet.
    """
    schemas: dict[Any, Any] = {}

    def read(file: DataFile) -> tuple[Footer, Any]:
        if file.size == 0:
            raise DataError(f"{file.path} is corrupt or no Parquet file: it is empty (0 bytes)")
        with open_parquet(file.path) as parquet, wrap_read_errors(file.path):
            metadata = parquet.metadata
            schema = parquet.schema_arrow.remove_metadata()
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        # Files of one dataset mostly share a schema: one object for all keeps a pickled source small.
        schema = schemas.setdefault(schema, schema)
        sizes = tuple((group.num_rows, group.total_byte_size) for group in groups)
        return Footer(file.path, file.size, sizes, schema, tuple(partition_values(file.path).items())), metadata

    if len(files) == 1:
        results = [read(files[0])]
    else:
        with ThreadPoolExecutor(min(_THREADS, max(1, len(files))), thread_name_prefix="shoal-footers") as threads:
            results = list(threads.map(read, files))
    return [footer for footer, _ in results], {footer.path: metadata for footer, metadata in results}
