"""Make the paths of datasets absolute, and refuse paths that contain credentials or that Arrow cannot open."""

from __future__ import annotations

import functools
import os
import re
from typing import Any
from urllib.parse import urlsplit

from shoal.data.parquet.packaged import PACKAGED_SCHEME, unpacked_path
from shoal.errors import DataAccessError, DataError, InvalidArgumentError, shown
from shoal.redaction import has_credentials, redact_address, redact_value, redacted_errors

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
# If bytes of a file name are not valid UTF-8, Python decodes them to surrogate characters. Arrow cannot open a path
# with such characters, so the path is refused.
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTION = re.compile(r"\w+=")


def refuse_incomplete_address(text: str, option: str) -> None:
    """Refuse an address without a scheme (``//host/path``), or with one slash after it (``s3:/bucket``).

    The system would read both as local paths, and shoal would create folders with these names.

    Raises:
        InvalidArgumentError: The address is incomplete.
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
    """Make a path absolute, so that a process with another working folder reads the same file.

    Raises:
        InvalidArgumentError: If `path` is not a valid path or URI, or is a URI that contains credentials.
    """
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
    if "://" in text and has_credentials(text):
        # The path is refused, because paths are written to job specs, logs and MLflow, where other users could read the
        # credentials.
        raise InvalidArgumentError(
            f"the path {redact_value(text)} contains credentials (hidden here): remove them from the path and set "
            "them in environment variables or in the usual credentials file, on this machine and on the nodes"
        )
    if text.startswith("file://"):
        from urllib.request import url2pathname

        return os.path.abspath(url2pathname(urlsplit(text).path))
    if not _SCHEME.match(text):
        return os.path.abspath(os.path.expanduser(text))
    return text.rstrip("/")


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
    if scheme == PACKAGED_SCHEME:
        return LocalFileSystem(), unpacked_path(rest)
    netloc, slash, inner = rest.partition("/")
    if scheme in _ARROW_SCHEMES:
        filesystem, base = _arrow_filesystem(f"{scheme}://{netloc}{mark}{query}")
        return filesystem, f"{base.rstrip('/')}{slash}{inner}"
    filesystem, opened = _fsspec(scheme, netloc)
    return filesystem, str(opened._strip_protocol(head))


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
def _fsspec(scheme: str, netloc: str) -> tuple[Any, Any]:
    """Return the filesystem of a URI as an object of Arrow, and as an object of fsspec."""
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        opened = fsspec.core.url_to_fs(f"{scheme}://{netloc}")[0]
    except ImportError as exc:
        raise DataError(f"{scheme}:// paths need a package that is not installed here: {exc}") from exc
    except ValueError as exc:
        raise DataError(f"neither Arrow nor fsspec supports {scheme}:// paths: {exc}") from exc
    return PyFileSystem(FSSpecHandler(opened)), opened
