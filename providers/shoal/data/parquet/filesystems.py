"""Find the filesystem of a path: local, S3, GCS and all others that Arrow or fsspec can open."""

from __future__ import annotations

import functools
from typing import Any

from shoal.data.parquet import packaged
from shoal.data.parquet.paths import is_local, split_query
from shoal.errors import DataAccessError, DataError

# URI schemes that Arrow opens itself. fsspec opens all other schemes.
_ARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}


def resolve(path: str) -> tuple[Any, str]:
    """Return the filesystem, such as S3, for an absolute path or URI, and the path within this filesystem.

    Raises:
        DataError: If neither Arrow nor an installed fsspec package can open the path. If a package is missing, the
            message names it.
    """
    from pyarrow.fs import LocalFileSystem

    if is_local(path):
        return LocalFileSystem(), path
    head, mark, query = split_query(path)
    scheme, _, rest = head.partition("://")
    if scheme == packaged.SCHEME:
        return LocalFileSystem(), packaged.local_path(rest)
    netloc, slash, inner = rest.partition("/")
    if scheme in _ARROW_SCHEMES:
        filesystem, base = _arrow_filesystem(f"{scheme}://{netloc}{mark}{query}")
        return filesystem, f"{base.rstrip('/')}{slash}{inner}"
    return _fsspec_filesystem(scheme, netloc), _strip_protocol(scheme, netloc, head)


@functools.cache
def _arrow_filesystem(base: str) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

    try:
        filesystem, inner = FileSystem.from_uri(base)
    except (OSError, pa.ArrowException) as exc:
        raise DataAccessError(f"{base} cannot be opened: {exc}") from None
    return filesystem, inner


@functools.cache
def _fsspec(scheme: str, netloc: str) -> Any:
    import fsspec

    try:
        return fsspec.core.url_to_fs(f"{scheme}://{netloc}")[0]
    except ImportError as exc:
        raise DataError(f"{scheme}:// paths need a package that is not installed here: {exc}") from exc
    except ValueError as exc:
        raise DataError(f"neither Arrow nor fsspec supports {scheme}:// paths: {exc}") from exc


@functools.cache
def _fsspec_filesystem(scheme: str, netloc: str) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(_fsspec(scheme, netloc)))


def _strip_protocol(scheme: str, netloc: str, uri: str) -> str:
    return str(_fsspec(scheme, netloc)._strip_protocol(uri))
