"""Find small DataFrames, stored as Parquet files, that were sent with a job's code. Ray unpacks the package with the
code and these files on every node."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from shoal.errors import DataError

SCHEME = "shoal-package"

URI = f"{SCHEME}://"
"""Start of the URIs of files in the package."""

FOLDER = "_data"
"""Folder in the package for all files. Each file has a subfolder of its own, whose name is the SHA-256 of the file."""


def inside(digest: str, name: str) -> str:
    """Return the path of a file in the package.

    Args:
        digest: SHA-256 of the file, in hexadecimal digits.
        name: Name of the file.
    """
    return f"/{FOLDER}/{digest}/{name}"


def uri(inside: str) -> str:
    """Return the URI by which a dataset names a file in the package."""
    return URI + inside


@functools.cache
def local_path(inside: str) -> str:
    """Check the digest of a file in the package, and return the path of the file on this node.

    The folder of the unpacked package is in `sys.path`: Ray adds it in the workers, and the driver of a job adds it
    itself.

    Args:
        inside: Path in the package.

    Raises:
        DataError: If there is no such file on this node, or the file was changed.
    """
    digest = inside.split("/")[2]
    for folder in sys.path:
        path = Path(folder + inside)
        if folder and path.is_file():
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                raise DataError(f"{path} was changed after it was sent with the job: submit the job again")
            return str(path)
    raise DataError(
        f"{uri(inside)} is data that was sent with a job, and can be read only in this job: load the data anew"
    )
