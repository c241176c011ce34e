"""Paths of datasets and their files: make paths absolute, refuse those with credentials or that Arrow cannot open, and
list files, directories and globs. Paths also lead to small DataFrames that were sent with a job's code."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from shoal.data.connections import refusal, s3_filesystem, split_storage, storage_options
from shoal.data.filters import Filters
from shoal.data.listing import DataFile, Listing
from shoal.errors import DataAccessError, DataError, InvalidArgumentError, MissingExtraError, shown
from shoal.lazy_imports import fs, pa
from shoal.secrets.redaction import has_credentials, redact_address, redact_value, redacted_errors

T = TypeVar("T")
R = TypeVar("R")


def need(*packages: str, extra: str = "data") -> None:
    """Check that libraries of an extra are installed, before code that reads or writes rows imports them."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra)


# An object store takes 20 to 100 ms to return a footer, so 16 threads read a thousand footers in a few seconds.
_THREADS = 16


def in_threads(name: str, read: Callable[[T], R], items: Collection[T]) -> list[R]:
    """Call a function with each item, with several items at a time, and return the results in the order of the
    items."""
    if len(items) < 2:  # a thread costs time, and none can be started while Python ends
        return [read(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items)), thread_name_prefix=f"shoal-{name}") as threads:
        return list(threads.map(read, items))


PACKAGED_SCHEME = "shoal-package"

PACKAGED_URI = f"{PACKAGED_SCHEME}://"
"""Prefix of the URIs of files in the package, which can be used as paths of a dataset."""

PACKAGED_FOLDER = "_data"
"""Folder for data files in the package. Each file is in its own subfolder, whose name is the SHA-256 digest of the
file."""


def packaged_path(digest: str, name: str) -> str:
    """Return the path that a data file has inside the package that contains a job's code."""
    return f"/{PACKAGED_FOLDER}/{digest}/{name}"


@functools.cache
def unpacked_path(inside: str) -> str:
    """Check the digest of a data file in the package that contains a job's code, and return the file's path on this
    node.

    `sys.path` contains the folder of the unpacked package. Ray adds the folder in the workers, and the driver of a job
    adds it itself.
    """
    digest = inside.split("/")[2]
    for folder in sys.path:
        path = Path(folder + inside)
        if folder and path.is_file():
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                raise DataError(f"{path} was changed after it was sent with the job: submit the job again")
            return str(path)
    raise DataError(
        f"{PACKAGED_URI}{inside} is data that was sent with a job, and can be read only in this job: create the "
        "dataset again from the original data"
    )


_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
# If bytes of a file name are not valid UTF-8, Python decodes them to surrogate characters. Arrow cannot open a path
# with such characters, so the path is refused.
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTION = re.compile(r"\w+=")


def refuse_incomplete_address(text: str, option: str) -> None:
    """Refuse an address without a scheme (``//host/path``), or with one slash after it (``s3:/bucket``).

    The system would read both as local paths, and shoal would create folders with these names.
    """
    if text.startswith("//") and not text.startswith("///"):
        raise InvalidArgumentError(
            f"{option} {redact_address(text)} begins with //, as an address without a scheme does: write the scheme, "
            "such as s3://bucket/path, or one slash for a local path"
        )
    if match := _ONE_SLASH.match(text):
        raise InvalidArgumentError(
            f"{option} {redact_address(text)} has only one slash after {match['scheme']}: write {match['scheme']}:// "
            "(as a text, because pathlib.Path removes a slash), or ./ before the path of a local file"
        )


def normalise(path: str | os.PathLike[str]) -> str:
    """Make a path absolute, so that a process with another working folder reads the same file."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"a path must be a str or a Path, not {type(path).__name__}: {shown(path)}")
    text = os.fspath(path)
    if not text.strip():
        raise InvalidArgumentError("a path is empty: name a Parquet file, a directory or a glob")
    if "\0" in text or _SURROGATE.search(text):
        raise InvalidArgumentError(
            f"the path {shown(text)} contains a NUL or a surrogate character, which Arrow cannot open: rename the file "
            "or directory"
        )
    refuse_incomplete_address(text, "the path")
    if _SCHEME.match(text):
        try:
            with redacted_errors(text):
                urlsplit(text)
        except ValueError as error:
            raise InvalidArgumentError(f'the path "{text}" is not a valid URI: {error}') from None
    refuse_credentials(text)
    if text.startswith("file://"):
        from urllib.request import url2pathname

        return os.path.abspath(url2pathname(urlsplit(text).path))
    return os.path.abspath(os.path.expanduser(text)) if is_local(text) else text.rstrip("/")


def refuse_credentials(path: str) -> None:
    """Refuse a path with credentials, because paths are written to job specs, logs and MLflow, where other users could
    read them.

    Raises:
        InvalidArgumentError: The path is a URI with credentials; the message hides them.
    """
    if "://" in path and has_credentials(path):
        raise InvalidArgumentError(
            f"the path {redact_value(path)} contains credentials (hidden here): remove them from the path and set "
            "them in environment variables or in the usual credentials file, on this machine and on the nodes"
        )


def is_local(path: str) -> bool:
    """Return whether a path is on this machine's filesystem (including mounts); False for a URI."""
    return not _SCHEME.match(path)


def join(base: str, name: str) -> str:
    """Append a file name to the path or URI of a directory. In a URI with ``?`` options, the name is inserted before
    the options."""
    head, mark, query = split_query(base)
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def split_query(path: str) -> tuple[str, str, str]:
    """Split a URI such as ``s3://b/k?region=x`` into the path, ``?`` and the options.

    Without options, the last two strings are empty. Options begin only at a ``?`` that is in a URI and precedes
    ``name=``. Any other ``?`` is a wildcard and stays in the path.
    """
    head, mark, query = path.partition("?")
    return (head, mark, query) if _OPTION.match(query) and not is_local(path) else (path, "", "")


# URI schemes that Arrow opens itself. fsspec opens all other schemes.
_ARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}


def resolve(path: str) -> tuple[Any, str]:
    """Return the filesystem, such as S3, for an absolute path or URI, and the path within this filesystem."""
    if is_local(path):
        return fs.LocalFileSystem(), path
    storage, address = split_storage(path)
    head, mark, query = split_query(address)
    scheme, _, rest = head.partition("://")
    if scheme == PACKAGED_SCHEME:
        return fs.LocalFileSystem(), unpacked_path(rest)
    netloc, slash, inner = rest.partition("/")
    if storage is not None:
        return s3_filesystem(netloc, tuple(storage_options("pyarrow", storage, query).items())), rest
    if scheme in _ARROW_SCHEMES:
        filesystem, base = _arrow_filesystem(f"{scheme}://{netloc}{mark}{query}")
        return filesystem, f"{base.rstrip('/')}{slash}{inner}"
    filesystem, opened = _fsspec(scheme, netloc)
    return filesystem, str(opened._strip_protocol(head))


@functools.cache
def _arrow_filesystem(base: str) -> tuple[Any, str]:
    try:
        filesystem, inner = fs.FileSystem.from_uri(base)
    except (OSError, pa.ArrowException) as exc:
        raise DataAccessError(f"{base} cannot be opened: {exc}") from None
    return filesystem, inner


@functools.cache
def _fsspec(scheme: str, netloc: str) -> tuple[Any, Any]:
    """Return the filesystem of a URI as an object of Arrow, and as an object of fsspec."""
    import fsspec

    try:
        opened = fsspec.core.url_to_fs(f"{scheme}://{netloc}")[0]
    except ImportError as exc:
        raise DataError(f"{scheme}:// paths need a package that is not installed here: {exc}") from exc
    except ValueError as exc:
        raise DataError(f"neither Arrow nor fsspec supports {scheme}:// paths: {exc}") from exc
    return fs.PyFileSystem(fs.FSSpecHandler(opened)), opened


_MAGIC = re.compile(r"[*?\[]")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
"""Pattern of the partition values that are read as integers."""


class ParquetPaths:
    """Lister of Parquet files: files, directories and globs.

    Args:
        paths: Absolute paths or URIs.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)

    @property
    def place(self) -> str:
        """The file, folder or glob, or the number of those that were given."""
        first = self.paths[0]
        return first if len(self.paths) == 1 else f"{len(self.paths)} paths, of which the first is {first}"

    @property
    def options(self) -> dict[str, Any]:
        """No options: the paths describe the files."""
        return {}

    def list_files(self, filters: Filters | None) -> Listing:
        """List all files that the paths match. The files of a directory or glob are ordered by path."""
        return Listing(list_files(self.paths))


def list_files(paths: Sequence[str]) -> tuple[DataFile, ...]:
    """Find all files that match the given paths, directories and globs."""
    need("pyarrow", "numpy")
    found: dict[str, DataFile] = {}
    checked: set[str] = set()
    for path in paths:
        filesystem, inner = resolve(path)
        try:
            files = _expand(filesystem, path, inner, checked)
        except (DataError, OSError, pa.ArrowException) as exc:
            problem = exc if isinstance(exc, DataError) else DataAccessError(f"{path} cannot be listed: {exc}")
            raise refusal(path, exc, filesystem, _folder_of(inner)) or problem from None
        for file in files:
            if file.path in found:
                raise InvalidArgumentError(
                    f"{file.path} is in the dataset twice, so its rows would be read twice: check that the given paths "
                    "do not overlap"
                )
            found[file.path] = file
    return tuple(found.values())


def partition_values(path: str) -> dict[str, str | None]:
    """Parse the Hive partition values in a file's path (``.../month=1/...``).

    The value ``__HIVE_DEFAULT_PARTITION__`` is returned as None.
    """
    values: dict[str, str | None] = {}
    for part in split_query(path)[0].split("/")[:-1]:
        key, mark, value = part.partition("=")
        if mark and key:
            values[unquote(key)] = None if value == _HIVE_NULL else unquote(value)
    return values


def _folder_of(pattern: str) -> str:
    """Return the path without its last parts, from the first one with a wildcard on."""
    return "/".join(itertools.takewhile(lambda part: not _MAGIC.search(part), pattern.split("/")))


def _expand(filesystem: Any, path: str, inner: str, checked: set[str]) -> list[DataFile]:
    """List the files of one path."""
    head, mark, query = split_query(path)
    # The filesystem returns paths without the prefix of the URI (scheme and account, such as "s3://"). The function
    # `canonical` adds the prefix that the user wrote.
    static = _folder_of(inner)

    def canonical(found: str, base: str) -> str:
        return f"{head[: len(head) - len(inner) + len(base)]}{found[len(base) :]}{mark}{query}"

    def check(directories: Iterable[str]) -> None:
        new = {directory for directory in directories if canonical(directory, static) not in checked}
        check_parents(filesystem, sorted(new))
        checked.update(canonical(directory, static) for directory in new)

    [info] = filesystem.get_file_info([inner])
    if info.type == fs.FileType.File:
        check([inner.rpartition("/")[0]])
        return [_found(path, info)]
    if info.type == fs.FileType.Directory:
        static = inner
        check([inner])
        if not (infos := _walk(filesystem, inner)):
            raise DataError(f"{path} is a directory without data files: name a directory that contains Parquet files")
    elif _MAGIC.search(inner):
        infos = []
        matches = _glob(filesystem, inner)
        check(match.path.rpartition("/")[0] if match.type == fs.FileType.File else match.path for match in matches)
        for match in matches:
            if match.type == fs.FileType.Directory:
                infos += _walk(filesystem, match.path)
            elif match.type == fs.FileType.File:
                infos.append(match)
        if not infos:
            raise DataError(
                f"{path} matches no file: check the pattern, and that this machine ({socket.gethostname()}) can access "
                "the files"
            )
    elif info.type == fs.FileType.Unknown:
        raise DataError(f"{path} is neither a regular file nor a directory, but a named pipe or a device, for example")
    else:
        here, host = os.getcwd(), socket.gethostname()
        is_below = Path(inner).is_relative_to(here)
        start = f". Relative paths start in {here}, the folder of this process" if is_below else ""
        raise DataError(f"{path} does not exist: check the path, and that this machine ({host}) can access it{start}")
    files = [_found(canonical(info.path, static), info) for info in infos]
    return sorted(files, key=lambda file: file.path)


def _found(path: str, info: Any) -> DataFile:
    return DataFile(path, info.size or 0, info.mtime_ns, partition_values(path))


def _is_hidden(relative: str) -> bool:
    # Files whose names begin with "_" or ".", such as _SUCCESS, _metadata and .crc, contain no data. Spark, Hive and
    # Arrow skip such files, too. A partition directory may be named _x=1, so names with "=" are not skipped.
    return any(part.startswith((".", "_")) and "=" not in part for part in relative.split("/"))


def _walk(filesystem: Any, base: str) -> list[Any]:
    """List the data files under a directory, recursively."""
    infos = filesystem.get_file_info(fs.FileSelector(base, recursive=True))
    check_listing(infos)
    skip = len(base.rstrip("/")) + 1
    return [info for info in infos if info.type == fs.FileType.File and not _is_hidden(info.path[skip:])]


def _glob(filesystem: Any, pattern: str) -> list[Any]:
    """Find the paths that match a glob, one path component at a time, so that only matching directories are listed."""
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
                below = filesystem.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
                here = filesystem.get_file_info([base])
                matches += [info for info in (*here, *below) if last or info.type == fs.FileType.Directory]
            elif _MAGIC.search(part):
                infos = filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True))
                # A wildcard matches names that begin with "_" or "." only if the pattern begins with such a character,
                # like in a shell.
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
        bases = [info.path for info in matches if info.type == fs.FileType.Directory]
    unique = {info.path: info for info in matches if info.type != fs.FileType.NotFound}
    if rest[-1] == "**":
        return [info for info in unique.values() if info.type == fs.FileType.File and not _is_hidden(info.base_name)]
    return list(unique.values())


def partition_type(values: Iterable[str | None]) -> str:
    """Return the narrowest Arrow type for all values of a partition column: int32, int64 or string."""
    present = [value for value in values if value is not None]
    if not present or not all(WHOLE_NUMBER.fullmatch(value) for value in present):
        return "string"
    return "int32" if all(-(2**31) <= int(value) < 2**31 for value in present) else "int64"


_MARKERS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Name of the directory in which a table keeps its log -> kind of the table."""
_ICEBERG_LOG, _ICEBERG_FILE = "metadata", ".metadata.json"


def check_listing(infos: Iterable[Any]) -> None:
    """Check that a recursive listing of a directory contains no table of such a format."""
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
        found = in_threads("listing", lambda parent: _table_at(filesystem, parent), parents)
    for parent, table in zip(parents, found, strict=True):
        if table is not None:
            raise _refused(table[0], parent, table[1])


def _table_at(filesystem: Any, directory: str) -> tuple[str, str] | None:
    """Return the kind of the table at a directory and the path of its log; None if there is no table."""

    def below(name: str) -> str:
        return f"{directory}/{name}" if directory else name

    try:
        infos = filesystem.get_file_info([below(name) for name in (*_MARKERS, _ICEBERG_LOG)])
        *markers, log = (info.type == fs.FileType.Directory for info in infos)
        for marker, exists in zip(_MARKERS, markers, strict=True):
            if exists:
                return _MARKERS[marker], marker
        infos = filesystem.get_file_info(fs.FileSelector(below(_ICEBERG_LOG))) if log else []
        names = (info.base_name for info in infos)
        return next((("Iceberg", f"{_ICEBERG_LOG}/{name}") for name in names if name.endswith(_ICEBERG_FILE)), None)
    except (OSError, pa.ArrowException):
        # The user may be allowed to read the files, but not to list their parent directories.
        return None


def _refused(kind: str, root: str, log: str) -> DataError:
    advice = {
        "Delta": 'use DataConnector.from_delta with the directory of the table, or format="delta" in a spec',
        "Iceberg": 'use DataConnector.from_iceberg with the directory of the table, or format="iceberg" in a spec',
        "Hudi": "read the table with Hudi's or Spark's reader, and pass the rows to DataConnector.from_dataframe",
    }[kind]
    return DataError(
        f"{root or 'the directory'} is a table of {kind} (it contains {log}), and its Parquet files may contain rows "
        f"that were deleted or replaced, so they are not read as Parquet: {advice}"
    )
