"""Find the files of small frames that travel with a job's code in the package that Ray has unpacked on this node."""

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
"""Folder in the package. It has a folder for each file, whose name is the SHA-256 of the file."""


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
    """Return the path on this node of a file in the package, after a check of its digest.

    Ray adds the folder of the unpacked package to `sys.path` of the workers, and the driver does so itself.

    Args:
        inside: Path in the package.

    Raises:
        DataError: There is no such file on this node, or it was changed.
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
