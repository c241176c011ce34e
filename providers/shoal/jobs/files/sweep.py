"""Remove the files that killed processes have left for ended attempts: credentials, working folders and staged data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session, defer

from shoal.data.staging import staged_data
from shoal.data.staging.staged_data import default_location
from shoal.errors import ShoalError
from shoal.jobs import credentials
from shoal.jobs.files import artifacts, staged_data_claims, storage, working_folder
from shoal.jobs.journal.attempts import Key
from shoal.pool.holder import Notice, job_holder
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job

log = logging.getLogger(__name__)

_NAMED = '"staging": "'
"""Text in each stored spec that names a folder of staged data; in other specs, the value is null."""

_PAGE = 100
"""Number of rows that are read at a time."""


def discard_leftovers(store: Store) -> list[str]:
    """Remove credentials, working folders and staged data of ended attempts from this host's `$SHOAL_HOME`.

    Files that belong to no attempt in this store are kept, because several stores may share one `$SHOAL_HOME`, and the
    files may belong to an attempt in another store.
    """
    # Half-written models and results may fill the disk.
    half_written = {}
    for key in (Key(*found) for found in sorted(storage.unfinished())):
        half_written[key.submission_id] = artifacts.folder(key, None)
    kinds: list[tuple[Iterable[str], Callable[[str], None], str]] = [
        (credentials.left(), credentials.discard_all, "credentials that no driver had read"),
        (working_folder.left(), working_folder.discard, "its working folder"),
        (half_written, lambda each: storage.discard_unfinished(half_written[each]), "a half-written file"),
    ]
    did: list[str] = []
    for submission_ids, remove, removed in kinds:
        for submission_id in submission_ids:
            with store.reading() as session:
                ended = _has_ended(session, submission_id)
            if ended and (of := _key(submission_id)):
                remove(submission_id)
                did.append(_about(of, f"removed {removed}"))
    return [*did, *_staged_data(store)]


def _staged_data(store: Store) -> Iterator[str]:
    users = {location: found for location in _staged_here() if (found := _claims(location)) is not None}
    if not users:
        return
    remaining = set(users)
    filled: dict[str, Key] = {}
    named: dict[str, Key] = {}
    with store.reading() as session:
        for location in sorted(remaining):
            key = _of_query(location)
            if key is not None and (job := _row(session, key)) is not None:
                remaining.remove(location)
                filled |= {location: key} if job.state in JOB_ENDED else {}
        remaining -= _needed(session) if remaining else set()
        if remaining:
            # The remaining folders may belong to jobs that ended long ago, so all ended jobs are searched. The query
            # returns only the few specs that name a folder of staged data.
            naming = cast(Job.spec, Text).contains(_NAMED)
            ended = select(Job.id, Job.attempt, Job.spec).where(Job.state.in_(JOB_ENDED), naming)
            for job_id, attempt, spec in session.execute(ended.execution_options(yield_per=_PAGE)):
                named |= dict.fromkeys(remaining.intersection(_staged(spec)), Key(job_id, attempt))
        gone = {location: [user for user in users[location] if _has_ended(session, user)] for location in remaining}
    for location, key in filled.items():
        if _tried(location, staged_data_claims.discard, [location]):
            yield _about(key, "removed its staged data")
    for location in sorted(remaining):
        if _tried(location, _discard_unused, location, gone[location], location in named):
            if key := named.get(location):
                yield _about(key, "removed its staged data")
            else:
                yield f"removed staged data {location}, which no process and no job uses any more"


def _about(key: Key, action: str) -> Notice:
    return Notice(f"job {key.job_id}, attempt {key.attempt}: {action}", job_holder(key.job_id))


def _claims(location: str) -> set[str] | None:
    """Return the ids of the attempts that use a folder of staged data; None if the folder cannot be read."""
    try:
        return staged_data.claims(location)
    except OSError as error:
        log.warning("the staged data in %s cannot be read, so they are not removed: %s", location, error)
        return None


def _discard_unused(location: str, gone: Collection[str], known: bool) -> bool:
    """Remove a folder of staged data if no job and no process uses it any more, and return whether it was removed."""
    for user in gone:
        staged_data.unclaim(location, user)
    return (known or not staged_data.is_held(location, unknown=True)) and staged_data.discard_unused(location)


def _tried(location: str, act: Callable[..., bool | None], *args: Any) -> bool:
    """Call a function that removes a folder, and return False if the function returns False or raises an error. The
    error is only logged, so that the sweep goes on with the other folders."""
    try:
        return act(*args) is not False
    except (ShoalError, OSError) as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)
        return False


def discard_staged(store: Store, job: Job) -> None:
    """Remove the staged data of one ended attempt from this host's `$SHOAL_HOME`, unless another job still uses the
    data."""
    here, key = _staged_here(), Key(job.id, job.attempt)
    staged_data_claims.discard(location for location in here if _of_query(location) == key)
    if mine := here.intersection(_staged(job.spec)):
        with store.reading() as session:
            mine -= _needed(session)
        staged_data_claims.give_up(key, mine)


def _row(session: Session, key: Key) -> Job | None:
    return session.get(Job, (key.job_id, key.attempt), options=[defer(Job.spec)])


def _has_ended(session: Session, submission_id: str) -> bool:
    """Return True if this store has the attempt with the given submission id, and the attempt has ended."""
    key = _key(submission_id)
    job = key and _row(session, key)
    return bool(job and job.state in JOB_ENDED)


def _staged_here() -> set[str]:
    folder = Path(default_location())
    return {str(path) for path in folder.iterdir() if path.is_dir()} if folder.exists() else set()


def _needed(session: Session) -> set[str]:
    """Return the folders of staged data that the specs of active jobs name."""
    specs = session.scalars(select(Job.spec).where(Job.state.not_in(JOB_ENDED)))
    return {location for spec in specs for location in _staged(spec)}


def _of_query(location: str) -> Key | None:
    """Read from a folder's name which attempt has filled the folder with the rows of an SQL query.

    The result is None if the name has another form than in `staged_queries.locations`.
    """
    submission_id, _, number = Path(location).name.rpartition(".")
    return _key(submission_id) if number.isdigit() else None


def _key(submission_id: str) -> Key | None:
    job_id, _, attempt = submission_id.rpartition("-")
    return Key(job_id, int(attempt)) if attempt.isdigit() else None


def _staged(spec: Any) -> Iterator[str]:
    """Yield the folders of staged data that a stored spec names. The spec may be from another version of shoal."""
    if isinstance(spec, dict):
        location = spec.get("staging")
        if isinstance(location, str):
            yield location
    for item in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _staged(item)
