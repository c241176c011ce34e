"""Create directories for staged data (Parquet files that shoal writes for the workers) in a staging location."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from shoal.data.libraries import need
from shoal.data.parquet.filesystems import resolve
from shoal.data.parquet.paths import is_local, join, normalise
from shoal.data.staging.staged_data import discard, hold
from shoal.errors import DataAccessError, DataError, InvalidArgumentError

_GLOB = "*?[]"
"""Characters that fsspec interprets as a pattern when it removes a directory. URIs that contain these characters are
refused."""


def default_location() -> str:
    """Return the default staging location: ``$SHOAL_HOME/staging``, or ``~/.shoal/staging`` without ``SHOAL_HOME``."""
    home = os.environ.get("SHOAL_HOME") or "~/.shoal"
    return str(Path(home).expanduser().absolute() / "staging")


@contextlib.contextmanager
def staged(staging_location: str | os.PathLike[str] | None = None, name: str | None = None) -> Iterator[str]:
    """Create a directory for one staged dataset, and remove the directory if the ``with`` block raises an exception.

    Raises:
        InvalidArgumentError: If the URI contains a wildcard character, because then fsspec could not remove the staged
            data.
        DataError: If the location is not writable.
        MissingExtraError: If the libraries of the extra ``data`` are not installed.
    """
    need("pyarrow", "numpy")
    import pyarrow as pa

    base = default_location() if staging_location is None else normalise(staging_location)
    if not is_local(base) and any(character in base for character in _GLOB):
        raise InvalidArgumentError(
            f"staging_location {base} contains one of the characters {_GLOB}: use a URI without these characters"
        )
    directory = join(base, name or uuid.uuid4().hex)
    try:
        if is_local(directory):
            # With mode 700, other users of this host cannot read the staged rows.
            Path(base).mkdir(parents=True, exist_ok=True, mode=0o700)
            Path(directory).mkdir(mode=0o700)
        filesystem, inner = resolve(directory)
        filesystem.create_dir(inner, recursive=True)
        hold(directory)
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as exc:
        # ValueError is also caught, because Python raises it for a path that contains a NUL character.
        raise DataAccessError(
            f"data cannot be staged in {base}: {exc}; pass staging_location= with a writable directory or URI"
        ) from None
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError, DataError):
            discard(directory)
        raise
