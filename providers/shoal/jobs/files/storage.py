"""Read and write the files of jobs at local paths or fsspec URIs, and say in which folders they lie.

A written file is either complete or absent.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from shoal.errors import JobError
from shoal.secrets.redaction import redact_value, redacted_errors
from shoal.state import Store
from shoal.state.home import home, subfolder
from shoal.state.private_folders import remove_folder
from shoal.state.schema import Job, Pool
from shoal.training import locations
from shoal.training.locations import make_folder, new_file, open_file

IN_STORE = "shoal-store://jobs"
"""URI of the location of results that are kept in the store itself (`shoal.jobs.files.database_files`)."""

_UNFINISHED = re.compile(r".+\.[0-9a-f]{32}")
"""Pattern of the names of temporary files, which get their final names when they are complete."""


def root(artifact_location: str | None) -> str:
    """Return the directory or URI under which the files of all jobs are stored."""
    return locations.local_path(artifact_location).rstrip("/") if artifact_location else str(home() / "jobs")


def as_given(path: str, artifact_location: str | None) -> str:
    """Put the credentials of `artifact_location` into a path from a `JobResult`, because a result contains no
    credentials.
    """
    given = root(artifact_location)
    shown = redact_value(given)
    return given + path.removeprefix(shown) if path.startswith(f"{shown}/") else path


def read_unchanged(path: str, digest: str) -> bytes:
    """Check the digest of a file that belongs to a job, and return the file's content."""
    try:
        content = read(path)
    except OSError as error:
        raise JobError(f"a file of the job cannot be read: {error}. Submit the job again") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise JobError(f"the job's file {path} was changed after it was stored: submit the job again")
    return content


def write(path: str, content: bytes) -> None:
    """Write a file atomically, so that a reader finds either the complete file or none."""
    if "://" in path:
        import fsspec

        # No temporary file is needed, because an object store makes an object visible only when the object is complete.
        with redacted_errors(path), fsspec.open(path, "wb") as file:
            file.write(content)
        return
    make_folder(str(Path(path).parents[1]), str(Path(path).parent))
    with new_file(path) as file:
        file.write(content)


def unfinished() -> set[tuple[str, int]]:
    """Return the job id and attempt of each folder under `$SHOAL_HOME` in which a killed process has left a temporary
    file."""
    found = (path for path in Path(root(None)).glob("*/*/*") if _UNFINISHED.fullmatch(path.name))
    return {(path.parts[-3], int(path.parts[-2])) for path in found if path.parts[-2].isdigit()}


def discard_unfinished(folder: str) -> None:
    """Remove temporary files that a killed process has left in a local folder.

    For a URI the function does nothing, because no temporary files are written to object stores.
    """
    if "://" in folder:
        return
    for path in Path(folder).glob("*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def read(path: str) -> bytes:
    """Return the content of a file at a local path or a URI."""
    if "://" not in path:
        with open_file(path) as local:
            return local.read()
    import fsspec

    with redacted_errors(path), fsspec.open(path, "rb") as file:
        content = file.read()
    assert isinstance(content, bytes)
    return content


def remove(path: str) -> None:
    """Remove a file; a file that does not exist is no error."""
    if "://" not in path:
        Path(path).unlink(missing_ok=True)
        return
    filesystem, inner = locations.filesystem(path)
    with redacted_errors(path), suppress(FileNotFoundError):
        filesystem.rm_file(inner)


_FOLDER = "work"


def of_attempt(store: Store, job: Job, submission_id: str) -> str:
    """Return the folder in which an attempt's workers run.

    On an embedded pool, the folder is the working folder of the process that submitted the job, so that relative paths
    work as users expect. On any other pool, each attempt has a folder of its own in `$SHOAL_HOME`, which this function
    creates.
    """
    pool = store.get(Pool, job.pool)
    callers = job.submitter["folder"]
    if pool is not None and pool.owner and callers:
        return str(callers)
    return str(subfolder(_FOLDER, submission_id))


def is_of_attempt(folder: str) -> bool:
    """Return whether a folder belongs to an attempt, with which it is removed, and not to the caller."""
    return Path(folder).parent == subfolder(_FOLDER)


def discard(submission_id: str) -> None:
    """Remove the working folder of an attempt that has ended, if it has one."""
    remove_folder(subfolder(_FOLDER) / submission_id)


def left() -> set[str]:
    """Return the ids of the submissions that still have a working folder on this host."""
    return {path.name for path in subfolder(_FOLDER).iterdir()}


def default_database() -> Path:
    """Return the path of the database."""
    return subfolder("mlflow") / "mlflow.db"


def default_uri() -> str:
    """Return the tracking URI of the database."""
    return f"sqlite:///{default_database()}"
