"""Files that jobs leave, on a local path or at any fsspec URI; complete or absent."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from shoal.redaction import redact_value, redacted_errors
from shoal.state.home import home
from shoal.training import locations

_UNFINISHED = re.compile(r".+\.[0-9a-f]{32}")
"""Names of files that are being written."""


def root(artifact_location: str | None) -> str:
    """Return the directory or URI for jobs' files: the given one, else a folder of `$SHOAL_HOME`."""
    return locations.local_path(artifact_location).rstrip("/") if artifact_location else str(home() / "jobs")


def as_given(path: str, artifact_location: str | None) -> str:
    """Put the credentials of an `artifact_location` back into a path under it, which a `JobResult` has without them."""
    given = root(artifact_location)
    shown = redact_value(given)
    return given + path.removeprefix(shown) if path.startswith(f"{shown}/") else path


def write(path: str, content: bytes) -> None:
    """Write a file that is complete or absent."""
    if "://" in path:
        import fsspec

        # An object store shows an object when it is complete, and not before.
        with redacted_errors(path), fsspec.open(path, "wb") as file:
            file.write(content)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}")  # threads write, and hosts with equal pids
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def discard_unfinished(folder: str) -> None:
    """Remove files that a killed process was writing; those at a URI are complete or absent by themselves."""
    if "://" in folder:
        return
    for path in Path(folder).glob("*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def read(path: str) -> bytes:
    """Read a file.

    Raises:
        OSError: It is gone, or out of reach.
    """
    if "://" not in path:
        return Path(path).read_bytes()
    import fsspec

    with redacted_errors(path), fsspec.open(path, "rb") as file:
        content = file.read()
    assert isinstance(content, bytes)
    return content
