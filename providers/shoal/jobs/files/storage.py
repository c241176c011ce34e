"""Read and write files on a local path or at an fsspec URI; a file is either complete or absent."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from shoal.redaction import redact_value, redacted_errors
from shoal.state.home import home
from shoal.training import locations

_UNFINISHED = re.compile(r".+\.[0-9a-f]{32}")
"""Names of temporary files that are still being written."""


def root(artifact_location: str | None) -> str:
    """Return the directory or URI for jobs' files: the given one, or the folder `jobs` in `$SHOAL_HOME`."""
    return locations.local_path(artifact_location).rstrip("/") if artifact_location else str(home() / "jobs")


def as_given(path: str, artifact_location: str | None) -> str:
    """Return a path from a `JobResult` with the credentials of its `artifact_location` put back in."""
    given = root(artifact_location)
    shown = redact_value(given)
    return given + path.removeprefix(shown) if path.startswith(f"{shown}/") else path


def write(path: str, content: bytes) -> None:
    """Write a file atomically: readers find it complete or not at all."""
    if "://" in path:
        import fsspec

        # Object stores show an object only when it is complete.
        with redacted_errors(path), fsspec.open(path, "wb") as file:
            file.write(content)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")  # pids are not unique: threads and hosts
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def discard_unfinished(folder: str) -> None:
    """Remove temporary files that a killed process has left in a local folder; object stores have none."""
    if "://" in folder:
        return
    for path in Path(folder).glob("*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def read(path: str) -> bytes:
    """Read a file.

    Raises:
        OSError: The file is gone, or cannot be reached.
    """
    if "://" not in path:
        return Path(path).read_bytes()
    import fsspec

    with redacted_errors(path), fsspec.open(path, "rb") as file:
        content = file.read()
    assert isinstance(content, bytes)
    return content
