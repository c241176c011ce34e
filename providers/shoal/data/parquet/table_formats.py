"""Refuse the Parquet files of Delta, Iceberg and Hudi tables.

Such files may contain rows that were deleted or replaced. Only the table's log says which rows still belong to the
table, and shoal does not read this log.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.errors import DataError

_MARKERS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Name of the directory in which a table keeps its log -> kind of the table."""
_ICEBERG_LOG, _ICEBERG_FILE = "metadata", ".metadata.json"
_THREADS = 16


def check_listing(infos: Iterable[Any]) -> None:
    """Check that a recursive listing of a directory contains no table of such a format.

    Raises:
        DataError: If there is such a table.
    """
    for info in infos:
        head, _, name = info.path.rpartition("/")
        if name.endswith(_ICEBERG_FILE) and head.rpartition("/")[2] == _ICEBERG_LOG:
            raise _refused("Iceberg", head.rpartition("/")[0], f"{_ICEBERG_LOG}/{name}")
        for marker, kind in _MARKERS.items():
            root, found, _ = f"{info.path}/".partition(f"/{marker}/")
            if found:
                raise _refused(kind, root, marker)


def check_parents(filesystem: Any, directories: Iterable[str]) -> None:
    """Check that directories are not in a table of such a format, by looking for the table's log in each of their
    parent directories.

    Raises:
        DataError: If a directory belongs to such a table.
    """
    parents: dict[str, None] = {}
    for directory in dict.fromkeys(directories):
        parts = directory.rstrip("/").split("/")
        for stop in range(len(parts), 0, -1):
            # A partition directory such as month=1 is never the directory of a table.
            if "=" not in parts[stop - 1] and "/".join(parts[:stop]):
                parents["/".join(parts[:stop])] = None
    if filesystem.type_name == "subtree":
        parents[""] = None
    if not parents:
        return
    if filesystem.type_name == "local":
        found = [_table_at(filesystem, parent) for parent in parents]
    else:
        with ThreadPoolExecutor(min(_THREADS, len(parents)), thread_name_prefix="shoal-listing") as threads:
            found = list(threads.map(lambda parent: _table_at(filesystem, parent), parents))
    for parent, table in zip(parents, found, strict=True):
        if table is not None:
            raise _refused(table[0], parent, table[1])


def _table_at(filesystem: Any, directory: str) -> tuple[str, str] | None:
    """Return the kind of the table at a directory and the path of its log; None if there is no table."""
    import pyarrow as pa
    from pyarrow.fs import FileSelector, FileType

    def below(name: str) -> str:
        return f"{directory}/{name}" if directory else name

    try:
        infos = filesystem.get_file_info([below(name) for name in (*_MARKERS, _ICEBERG_LOG)])
        *markers, log = (info.type == FileType.Directory for info in infos)
        for marker, exists in zip(_MARKERS, markers, strict=True):
            if exists:
                return _MARKERS[marker], marker
        names = [info.base_name for info in filesystem.get_file_info(FileSelector(below(_ICEBERG_LOG)))] if log else []
        return next((("Iceberg", f"{_ICEBERG_LOG}/{name}") for name in names if name.endswith(_ICEBERG_FILE)), None)
    except (OSError, pa.ArrowException):
        # The user may be allowed to read the files, but not to list their parent directories.
        return None


def _refused(kind: str, root: str, log: str) -> DataError:
    library = {
        "Delta": "with deltalake: DataConnector.from_dataset(DeltaTable(...).to_pyarrow_dataset())",
        "Iceberg": "with pyiceberg: DataConnector.from_dataframe(table.scan().to_arrow())",
        "Hudi": "with Hudi's or Spark's reader",
    }[kind]
    return DataError(
        f"{root or 'the directory'} is a table of {kind} (it contains {log}), and its Parquet files may contain rows "
        "that were deleted or replaced, so they are not read as Parquet: read the table with its own library, and pass "
        f"the rows to DataConnector.from_dataset or from_dataframe ({library})"
    )
