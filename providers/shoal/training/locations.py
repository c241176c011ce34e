"""Make the locations of results and of SQLite files absolute, and test that results can be written to a location."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shoal.data.parquet.files import refuse_incomplete_address
from shoal.errors import InvalidArgumentError
from shoal.new_files import SHARED_MODE, create_folder
from shoal.redaction import HIDDEN, redact_address, redacted_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_FILE = "file://"
SQLITE = "sqlite:///"
"""Prefix of the SQLAlchemy URL of an SQLite file."""


def resolved(location: str, option: str = "artifact_location") -> str:
    """Make a location absolute, so that another process on this host writes to the same place.

    Absolute paths and URIs are returned unchanged. Otherwise the fingerprints of stored jobs would change, because a
    fingerprint depends on the location.

    Raises:
        InvalidArgumentError: The location is blank, an address without a scheme, or a ``file://`` URI with a host.
    """
    if not location.strip():
        raise InvalidArgumentError(f"{option} is blank: give a directory or a URI, or omit this option")
    refuse_incomplete_address(location, option)
    if location.startswith(_FILE):
        with redacted_errors(location):
            host = urlsplit(location).netloc
        if host not in ("", "localhost"):
            # The host may be a password, for example in file://user:password@/path.
            shown = redact_address(location)
            raise InvalidArgumentError(
                f'{option} "{shown}" contains the host "{urlsplit(shown).netloc or HIDDEN}": write '
                "file:///absolute/path without a host, or a path"
            )
        return location
    if "://" in location or os.path.isabs(location):
        return location
    return os.path.abspath(os.path.expanduser(location))


def absolute_database(url: str) -> str:
    """Make the path in the URL of an SQLite file absolute, for processes with another working directory."""
    if not url.startswith(SQLITE) or url.startswith(f"{SQLITE}/"):
        return url
    return SQLITE + str(Path(url.removeprefix(SQLITE)).absolute())


def local_path(location: str) -> str:
    """Return the path of a ``file://`` URI; any other location is returned unchanged."""
    return url2pathname(urlsplit(location).path) if location.startswith(_FILE) else location


def filesystem(location: str) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's filesystem for a path or URI, and the path in this filesystem, without a slash at its end.

    The filesystem does not cache lists of files, because other processes write to the location at the same time.
    """
    import fsspec

    fs, root = fsspec.core.url_to_fs(location, use_listings_cache=False)
    return fs, str(root).rstrip("/")


def is_local(fs: AbstractFileSystem) -> bool:
    """Return whether fsspec's filesystem is the local one, also if its files are named by a ``file://`` URI."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def try_out(location: str, option: str = "artifact_location") -> None:
    """Test that files can be written to a location, and create the folder if it does not exist.

    The test writes a small file and removes it.

    Raises:
        InvalidArgumentError: The location cannot be written to; the message contains the cause.
    """
    refuse_incomplete_address(location, option)
    try:
        if "://" in location:
            with redacted_errors(location):
                _try_out_uri(location)
        else:
            create_folder(Path(location), SHARED_MODE)
            with tempfile.NamedTemporaryFile(dir=location, prefix=".shoal-trial-") as file:
                file.write(b"shoal")
    except Exception as error:
        # fsspec's filesystems raise exceptions of many types, so all types are caught.
        raise InvalidArgumentError(
            f'{option} "{redact_address(location)}" cannot be written to: {type(error).__name__}: {error}. '
            "Choose a directory or URI to which this host can write"
        ) from None


def _try_out_uri(location: str) -> None:
    import fsspec

    fs, root = fsspec.core.url_to_fs(location)
    trial = f"{str(root).rstrip('/')}/.shoal-trial-{uuid.uuid4().hex}"
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(trial, b"shoal")
    fs.rm_file(trial)
