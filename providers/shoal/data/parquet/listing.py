"""From what a user names (files, directories, globs) to the files themselves, in their natural order."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from shoal.data.parquet.filesystems import resolve, split_query
from shoal.errors import DataError, InvalidArgumentError

_MAGIC = re.compile(r"[*?\[]")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a dataset.

    Args:
        path: Canonical path or URI.
        size: Size in bytes.
    """

    path: str
    size: int


def list_files(paths: Sequence[str]) -> tuple[DataFile, ...]:
    """Finds the files of a dataset.

    Args:
        paths: Normalised paths: files, directories (searched to the bottom; names that begin with ``_`` or ``.`` are
            left out) or globs (``*``, ``?``, ``[...]``, ``**``).

    Returns:
        The files in natural order: `paths` as given, within a directory or glob sorted by path.

    Raises:
        DataError: If a path does not exist, holds nothing, or cannot be listed.
        InvalidArgumentError: If two of the paths lead to the same file.
    """
    found: dict[str, DataFile] = {}
    for path in paths:
        for file in _expand(path):
            if file.path in found:
                raise InvalidArgumentError(f"{file.path} is named twice in the dataset: its rows would count twice")
            found[file.path] = file
    return tuple(found.values())


def partition_values(path: str) -> dict[str, str | None]:
    """Reads the Hive partition values (``.../month=1/...``) out of a file's path; the empty partition's is None."""
    values: dict[str, str | None] = {}
    for part in split_query(path)[0].split("/")[:-1]:
        key, mark, value = part.partition("=")
        if mark and key:
            values[unquote(key)] = None if value == _HIVE_NULL else unquote(value)
    return values


def _expand(path: str) -> list[DataFile]:
    import pyarrow as pa

    filesystem, inner = resolve(path)
    try:
        return _expand_with(filesystem, path, inner)
    except DataError:
        raise
    except (OSError, pa.ArrowException) as exc:
        raise DataError(f"{path} cannot be listed: {exc}") from None


def _expand_with(filesystem: Any, path: str, inner: str) -> list[DataFile]:
    from pyarrow.fs import FileType

    head, mark, query = split_query(path)
    # What the user wrote goes in front again: the filesystem's own paths have lost scheme and account, a file's must
    # not.
    parts = inner.split("/")
    static = "/".join(itertools.takewhile(lambda part: not _MAGIC.search(part), parts))

    def canonical(found: str, base: str) -> str:
        return f"{head[: len(head) - len(inner) + len(base)]}{found[len(base) :]}{mark}{query}"

    [info] = filesystem.get_file_info([inner])
    if info.type == FileType.File:
        return [DataFile(path, info.size or 0)]
    if info.type == FileType.Directory:
        static = inner
        infos = _walk(filesystem, inner)
        if not infos:
            raise DataError(f"{path} is a directory without data files: name one that holds Parquet files")
    elif _MAGIC.search(inner):
        infos = []
        for match in _glob(filesystem, inner):
            infos += [match] if match.type == FileType.File else _walk(filesystem, match.path)
        if not infos:
            raise DataError(f"{path} matches no file: check the pattern, and that it is seen from this machine")
    else:
        raise DataError(f"{path} does not exist: check the path, and that it is seen from this machine ({_where()})")
    files = [DataFile(canonical(info.path, static), info.size or 0) for info in infos]
    return sorted(files, key=lambda file: file.path)


def _where() -> str:
    import socket

    return socket.gethostname()


def _is_hidden(relative: str) -> bool:
    # As Spark, Hive and Arrow do: _SUCCESS, _metadata, .crc and the like are no data. A partition may be called _x=1.
    return any(part.startswith((".", "_")) and "=" not in part for part in relative.split("/"))


def _walk(filesystem: Any, base: str) -> list[Any]:
    """Lists the data files under a directory."""
    from pyarrow.fs import FileSelector, FileType

    infos = filesystem.get_file_info(FileSelector(base, recursive=True))
    skip = len(base.rstrip("/")) + 1
    return [info for info in infos if info.type == FileType.File and not _is_hidden(info.path[skip:])]


def _glob(filesystem: Any, pattern: str) -> list[Any]:
    """Matches a pattern one path component at a time, so that only directories which match so far are listed."""
    from pyarrow.fs import FileSelector, FileType

    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if _MAGIC.search(part))
    bases = ["/".join(parts[:first]) or "/"]
    matches: list[Any] = []
    rest = parts[first:]
    for depth, part in enumerate(rest):
        last = depth == len(rest) - 1
        matches = []
        for base in bases:
            if part == "**":
                below = filesystem.get_file_info(FileSelector(base, recursive=True, allow_not_found=True))
                here = filesystem.get_file_info([base])
                matches += [info for info in (*here, *below) if last or info.type == FileType.Directory]
            elif _MAGIC.search(part):
                infos = filesystem.get_file_info(FileSelector(base, allow_not_found=True))
                # As in a shell, a wildcard does not find hidden names.
                visible = part.startswith((".", "_"))
                matches += [
                    info
                    for info in infos
                    if fnmatch.fnmatchcase(info.base_name, part) and (visible or not _is_hidden(info.base_name))
                ]
            else:
                matches += filesystem.get_file_info([f"{base.rstrip('/')}/{part}"])
        if last:
            break
        bases = [info.path for info in matches if info.type == FileType.Directory]
    unique = {info.path: info for info in matches if info.type != FileType.NotFound}
    if rest[-1] == "**":
        return [info for info in unique.values() if info.type == FileType.File and not _is_hidden(info.base_name)]
    return list(unique.values())


def partition_type(values: Iterable[str | None]) -> str:
    """Names the narrowest Arrow type that holds all the values of a partition column: int32, int64 or string."""
    present = [value for value in values if value is not None]
    if not present or not all(re.fullmatch(r"-?\d{1,18}", value) for value in present):
        return "string"
    return "int32" if all(-(2**31) <= int(value) < 2**31 for value in present) else "int64"
