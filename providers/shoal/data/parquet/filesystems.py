"""Paths and the filesystems behind them: local, S3, GCS and whatever else Arrow or fsspec opens."""

from __future__ import annotations

import functools
import os
import re
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import DataError, InvalidArgumentError, shown
from shoal.redaction import has_credentials, redact_value

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
# Schemes that Arrow opens by itself; for all others there is fsspec.
_ARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}
_SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of bytes that are no UTF-8: Arrow takes no such path
_OPTION = re.compile(r"\w+=")


def normalise(path: str | os.PathLike[str]) -> str:
    """Makes a path absolute, so that another process reads the same file.

    Args:
        path: Local path (relative, with ``~``, or ``file://``) or URI.

    Returns:
        An absolute local path, or the URI without a trailing slash.

    Raises:
        InvalidArgumentError: If it is no path, or a URI with credentials in it.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"a path must be a str or a Path, not {type(path).__name__}: {shown(path)}")
    text = os.fspath(path)
    if not text.strip():
        raise InvalidArgumentError("a path is empty: name a Parquet file, a directory or a glob")
    if "\0" in text or _SURROGATE.search(text):
        raise InvalidArgumentError(f"the path {shown(text)} has a character that no path to data can have")
    if _SCHEME.match(text):
        try:
            urlsplit(text)
        except ValueError as error:
            raise InvalidArgumentError(f'the path "{text}" is no URI: {error}') from None
    if "://" in text and has_credentials(text):
        # The text of a path ends up in job specs, logs and MLflow.
        raise InvalidArgumentError(
            f"the path {redact_value(text)} had credentials in it: leave them to the environment "
            "or to the usual credentials file, which the nodes read too"
        )
    if text.startswith("file://"):
        from urllib.request import url2pathname

        return os.path.abspath(url2pathname(urlsplit(text).path))
    if not _SCHEME.match(text):
        return os.path.abspath(os.path.expanduser(text))
    return text.rstrip("/")


def is_local(path: str) -> bool:
    """Whether a normalised path lies on this machine's own filesystem (or on a mount of it)."""
    return not _SCHEME.match(path)


def join(base: str, name: str) -> str:
    """Appends a file name to a normalised directory path or URI."""
    head, mark, query = split_query(base)
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def split_query(path: str) -> tuple[str, str, str]:
    """Splits the options off a URI (``s3://b/k?region=x``); any other ``?`` is a wildcard."""
    head, mark, query = path.partition("?")
    return (head, mark, query) if _OPTION.match(query) and not is_local(path) else (path, "", "")


def resolve(path: str) -> tuple[Any, str]:
    """Finds the filesystem of a normalised path.

    Args:
        path: What :func:`normalise` returned.

    Returns:
        A ``pyarrow.fs.FileSystem`` and the path within it.

    Raises:
        DataError: If nothing here opens such a path; the message says what to install.
    """
    if is_local(path):
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem(), path
    head, mark, query = split_query(path)
    scheme, _, rest = head.partition("://")
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
        raise DataError(f"{base} cannot be opened: {exc}") from None
    return filesystem, inner


@functools.cache
def _fsspec(scheme: str, netloc: str) -> Any:
    import fsspec

    try:
        return fsspec.core.url_to_fs(f"{scheme}://{netloc}")[0]
    except ImportError as exc:
        raise DataError(f"{scheme}:// paths need a package that is not installed here: {exc}") from exc
    except ValueError as exc:
        raise DataError(f"{scheme}:// is no kind of path that Arrow or fsspec knows: {exc}") from exc


@functools.cache
def _fsspec_filesystem(scheme: str, netloc: str) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(_fsspec(scheme, netloc)))


def _strip_protocol(scheme: str, netloc: str, uri: str) -> str:
    return str(_fsspec(scheme, netloc)._strip_protocol(uri))
