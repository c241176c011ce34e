"""Find the Parquet files of small DataFrames that were sent with a job's code.

Ray unpacks the package with the code and these files on every node.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from shoal.errors import DataError

PACKAGED_SCHEME = "shoal-package"

PACKAGED_URI = f"{PACKAGED_SCHEME}://"
"""Prefix of the URIs of files in the package."""

PACKAGED_FOLDER = "_data"
"""Folder for data files in the package. Each file is in its own subfolder, whose name is the SHA-256 digest of the
file."""


def packaged_path(digest: str, name: str) -> str:
    """Return the path that a data file has inside the package that contains a job's code."""
    return f"/{PACKAGED_FOLDER}/{digest}/{name}"


def packaged_uri(inside: str) -> str:
    """Return the URI of a data file in the package that contains a job's code. The URI can be used as a path of a
    dataset."""
    return PACKAGED_URI + inside


@functools.cache
def unpacked_path(inside: str) -> str:
    """Check the digest of a data file in the package that contains a job's code, and return the file's path on this
    node.

    `sys.path` contains the folder of the unpacked package. Ray adds the folder in the workers, and the driver of a job
    adds it itself.

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
        f"{packaged_uri(inside)} is data that was sent with a job, and can be read only in this job: create the "
        "dataset again from the original data"
    )
