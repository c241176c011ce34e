"""Create and remove the working folder of an attempt, which is the current directory of its workers."""

from __future__ import annotations

from pathlib import Path

from shoal.state import Store
from shoal.state.home import subfolder
from shoal.state.private_folders import remove_folder
from shoal.state.schema import Job, Pool

_FOLDER = "work"


def of_attempt(store: Store, job: Job, submission_id: str) -> str:
    """Return the folder in which an attempt's workers run.

    On an embedded pool, the folder is the working folder of the process that submitted the job, so that relative paths
    work as users expect. On any other pool, each attempt has a folder of its own in `$SHOAL_HOME`, which this function
    creates.
    """
    with store.reading() as session:
        pool = session.get(Pool, job.pool)
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
