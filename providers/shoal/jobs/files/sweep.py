"""Remove files of ended attempts that killed processes did not remove themselves: credentials and staged data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, ShoalError
from shoal.jobs import credentials
from shoal.jobs.files import queries, staging
from shoal.jobs.journal.attempts import Key
from shoal.jobs.specs.function import parse_spec
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job

log = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Number of ended attempts, the newest ones, for whose staged data one call of `discard_leftovers` searches."""


def discard_leftovers(store: Store) -> list[str]:
    """Remove credentials and staged data of ended attempts from this host's `$SHOAL_HOME`.

    Files that belong to no attempt in this store are kept, because several stores may share one `$SHOAL_HOME`, and the
    files may belong to an attempt in another store.

    Returns:
        The actions that were taken, one sentence each.
    """
    return [*_credentials(store), *_staged_data(store)]


def _credentials(store: Store) -> Iterator[str]:
    for submission_id in credentials.left():
        job_id, _, attempt = submission_id.rpartition("-")
        with store.reading() as session:
            job = session.get(Job, (job_id, int(attempt))) if attempt.isdigit() else None
        if job is not None and job.state in JOB_ENDED:
            credentials.discard_all(submission_id)
            yield f"job {job_id}, attempt {attempt}: removed credentials that no driver had read"


def _staged_data(store: Store) -> Iterator[str]:
    there = _staged_here()
    if not there:
        return
    with store.reading() as session:
        ended = select(Job).where(Job.state.in_(JOB_ENDED)).order_by(Job.created_at.desc()).limit(_AT_ONCE)
        done = [(job, _staged(job)) for job in session.scalars(ended)]
        needed = _needed(session)
    for job, staged in done:
        unneeded = (staged & there) - needed
        there -= unneeded
        for location in unneeded:
            try:
                staging.discard([location])
            except (ShoalError, OSError) as error:  # log the error, and go on with the other folders
                log.warning("job %s, attempt %d: staged data could not be removed: %s", job.id, job.attempt, error)
            else:
                yield f"job {job.id}, attempt {job.attempt}: removed its staged data"


def discard_staged(store: Store, job: Job) -> None:
    """Remove the staged data of one ended attempt from this host's `$SHOAL_HOME`, unless an active job needs them."""
    if here := _staged(job) & _staged_here():
        with store.reading() as session:
            here -= _needed(session)
        staging.discard(here)


def _staged_here() -> set[str]:
    from shoal.data.staging.staged_data import default_location

    folder = Path(default_location())
    return {str(path) for path in folder.iterdir()} if folder.exists() else set()


def _needed(session: Session) -> set[str]:
    return {at for job in session.scalars(select(Job).where(Job.state.not_in(JOB_ENDED))) for at in _staged(job)}


def _staged(job: Job) -> set[str]:
    with suppress(InvalidArgumentError):  # a spec of another shoal version may be unreadable: keep the job's data
        spec = parse_spec(job.spec)
        return spec.staged() | set(queries.locations(spec, Key(job.id, job.attempt)).values())
    return set()
