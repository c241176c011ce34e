"""Remove files of ended attempts that killed processes did not remove: credentials, working folders, staged data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session, defer

from shoal.errors import ShoalError
from shoal.jobs import credentials
from shoal.jobs.files import staging, working_folder
from shoal.jobs.journal.attempts import Key
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job

log = logging.getLogger(__name__)

_NAMED = '"staging": "'
"""Text in the stored spec of a job that names a folder of staged data; in all other specs the value is null."""

_PAGE = 100
"""Number of rows that are read at a time."""


def discard_leftovers(store: Store) -> list[str]:
    """Remove credentials, working folders and staged data of ended attempts from this host's `$SHOAL_HOME`.

    Files that belong to no attempt in this store are kept, because several stores may share one `$SHOAL_HOME`, and the
    files may belong to an attempt in another store.

    Returns:
        The actions that were taken, one sentence each.
    """
    return [*_credentials(store), *_working_folders(store), *_staged_data(store)]


def _credentials(store: Store) -> Iterator[str]:
    for submission_id in _ended(store, credentials.left()):
        credentials.discard_all(submission_id)
        yield f"{_attempt(submission_id)}: removed credentials that no driver had read"


def _working_folders(store: Store) -> Iterator[str]:
    for submission_id in _ended(store, working_folder.left()):
        working_folder.discard(submission_id)
        yield f"{_attempt(submission_id)}: removed its working folder"


def _ended(store: Store, submission_ids: Iterable[str]) -> Iterator[str]:
    """Yield those submissions whose attempts have ended; a submission that this store does not know is left out."""
    for submission_id in submission_ids:
        job_id, _, attempt = submission_id.rpartition("-")
        with store.reading() as session:
            job = session.get(Job, (job_id, int(attempt))) if attempt.isdigit() else None
        if job is not None and job.state in JOB_ENDED:
            yield submission_id


def _attempt(submission_id: str) -> str:
    job_id, _, attempt = submission_id.rpartition("-")
    return f"job {job_id}, attempt {attempt}"


def _staged_data(store: Store) -> Iterator[str]:
    there = _staged_here()
    if not there:
        return
    done: list[tuple[Key, str]] = []
    with store.reading() as session:
        for location in sorted(there):
            key = _of_query(location)
            job = None if key is None else session.get(Job, (key.job_id, key.attempt), options=[defer(Job.spec)])
            if key is not None and job is not None:
                there.remove(location)
                done += [(key, location)] if job.state in JOB_ENDED else []
        there -= _needed(session) if there else set()
        if there:
            # The folders that are still in `there` may belong to jobs that ended long ago, so all ended jobs are
            # searched. The query returns only the few specs that name a folder of staged data.
            named = cast(Job.spec, Text).contains(_NAMED)
            ended = select(Job.id, Job.attempt, Job.spec).where(Job.state.in_(JOB_ENDED), named)
            for job_id, attempt, spec in session.execute(ended.execution_options(yield_per=_PAGE)):
                unneeded = there.intersection(_staged(spec))
                done += [(Key(job_id, attempt), location) for location in sorted(unneeded)]
                there -= unneeded
    for key, location in done:
        try:
            staging.discard([location])
        except (ShoalError, OSError) as error:  # log the error, and go on with the other folders
            log.warning("job %s, attempt %d: staged data could not be removed: %s", key.job_id, key.attempt, error)
        else:
            yield f"job {key.job_id}, attempt {key.attempt}: removed its staged data"


def discard_staged(store: Store, job: Job) -> None:
    """Remove the staged data of one ended attempt from this host's `$SHOAL_HOME`, unless an active job needs them."""
    here, key = _staged_here(), Key(job.id, job.attempt)
    mine = here.intersection(_staged(job.spec)) | {location for location in here if _of_query(location) == key}
    if mine:
        with store.reading() as session:
            mine -= _needed(session)
        staging.discard(mine)


def _staged_here() -> set[str]:
    from shoal.data.staging.staged_data import default_location

    location = Path(default_location())
    return {str(path) for path in location.iterdir()} if location.exists() else set()


def _needed(session: Session) -> set[str]:
    """Return the folders of staged data that the specs of active jobs name."""
    specs = session.scalars(select(Job.spec).where(Job.state.not_in(JOB_ENDED)))
    return {location for spec in specs for location in _staged(spec)}


def _of_query(location: str) -> Key | None:
    """Return the attempt whose SQL query filled a folder, which the folder's name says (see `queries.locations`)."""
    submission_id, _, number = Path(location).name.rpartition(".")
    job_id, _, attempt = submission_id.rpartition("-")
    return Key(job_id, int(attempt)) if number.isdigit() and attempt.isdigit() else None


def _staged(spec: Any) -> Iterator[str]:
    """Yield the folders of staged data that a stored spec names; specs of other versions of shoal are read, too."""
    if isinstance(spec, dict):
        location = spec.get("staging")
        if isinstance(location, str):
            yield location
    for item in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _staged(item)
