"""Remove old ended attempts of jobs, and the files that killed processes have left for ended attempts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Text, cast, func, select, update
from sqlalchemy.orm import Session, defer

from shoal.data import staged_data
from shoal.data.staged_data import claims, default_location, discard_unused, is_held, unclaim
from shoal.errors import InvalidArgumentError, ShoalError, shown
from shoal.jobs import credentials
from shoal.jobs.files import artifacts, staged_rows, storage
from shoal.jobs.journal import attempts, metric_points, study_logs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import RetentionStep, act, transaction
from shoal.pool.bound_host import is_on_this_host
from shoal.pool.holder import Notice, asking_team, job_holder, may_change
from shoal.state import Store
from shoal.state.home import file_lock, lock_file
from shoal.state.schema import JOB_ENDED, Job, JobState, Pool, Promotion, PromotionState

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
    unfinished = (Key(*found) for found in sorted(storage.unfinished()))
    half_written = {key.submission_id: artifacts.folder(key, None) for key in unfinished}
    kinds: list[tuple[Iterable[str], Callable[[str], None], str]] = [
        (credentials.left(), credentials.discard_all, "credentials that no driver had read"),
        (storage.left(), storage.discard, "its working folder"),
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
    users: dict[str, set[str]] = {}
    for location in _staged_here():
        try:
            users[location] = claims(location)
        except OSError as error:
            log.warning("the staged data in %s cannot be read, so they are not removed: %s", location, error)
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
        with _logged(location):
            staged_data.discard(location)
            yield _about(key, "removed its staged data")
    for location in sorted(remaining):
        with _logged(location):
            for user in gone[location]:
                unclaim(location, user)
            key = named.get(location)
            if (key or not is_held(location, unknown=True)) and discard_unused(location):
                unused = f"removed staged data {location}, which no process and no job uses any more"
                yield _about(key, "removed its staged data") if key else unused


def _about(key: Key, action: str) -> Notice:
    return Notice(f"job {key.job_id}, attempt {key.attempt}: {action}", job_holder(key.job_id))


@contextmanager
def _logged(location: str) -> Iterator[None]:
    """Only log errors of a `with` block that removes a folder, so that the sweep goes on with the other folders."""
    try:
        yield
    except (ShoalError, OSError) as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)


def discard_staged(store: Store, job: Job) -> None:
    """Remove the staged data of one ended attempt from this host's `$SHOAL_HOME`, unless another job still uses the
    data."""
    here, key = _staged_here(), Key(job.id, job.attempt)
    for location in here:
        if _of_query(location) == key:
            staged_data.discard(location)
    if mine := here.intersection(_staged(job.spec)):
        with store.reading() as session:
            mine -= _needed(session)
        staged_rows.give_up(key, mine)


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

    The result is None if the name has another form than in `staged_rows.locations`.
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


log = logging.getLogger(__name__)

_YOUNGEST = timedelta(days=1)
"""Smallest age of what is deleted. A task that is retried within this time still finds its job's result. The job of a
younger version of a model may still compare the version with the champion, in another store, too."""


@dataclass(frozen=True)
class DeletedAttempt:
    """A removed attempt of a job; in a dry run, an attempt that would be removed.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt.
        state: State in which the attempt had ended.
        ended_at: Time at which the attempt had ended, in seconds since the epoch.
    """

    job_id: str
    attempt: int
    state: JobState
    ended_at: float


def checked_age(older_than: timedelta) -> float:
    """Check the age from which attempts or versions are deleted, and return it in seconds.

    Raises:
        InvalidArgumentError: `older_than` is not legal.
    """
    if not isinstance(older_than, timedelta) or older_than < _YOUNGEST:
        raise InvalidArgumentError(
            f"older_than={shown(older_than)} is not legal: it must be a timedelta of one day or more"
        )
    return older_than.total_seconds()


def prune_jobs(
    *,
    older_than: timedelta = timedelta(days=30),
    dry_run: bool = False,
    clock: Callable[[], float] = time.time,
) -> tuple[DeletedAttempt, ...]:
    """Remove old attempts that have ended, with their rows in the store and their files in `$SHOAL_HOME`.

    Attempts that have not ended, and attempts that a promotion names, are kept. A job with a `job_id` from its spec
    keeps its first and its newest attempt, so that the numbers of later attempts continue. All other jobs are removed
    as a whole, when their last attempt is old enough.

    The removed files are the log, the model and the return values, also those in the store. Files in an
    `artifact_location`, in MLflow and in folders without shoal's marker stay. The jobs of a pool on another host are
    removed only by that host, and a process that acts for a team (``$SHOAL_TEAM``) leaves the jobs of other teams.

    The function may be called at any time, by several processes at the same time, and again after it was killed.

    Args:
        older_than: Time since the end of the attempt, at least one day.
        dry_run: Remove nothing, and only return the attempts that would be removed.
        clock: Function that returns the present time in seconds since the epoch.

    Raises:
        InvalidArgumentError: `older_than` is not legal.
        StoreError: The store cannot be used.
    """
    before, store = clock() - checked_age(older_than), Store()
    removed: list[DeletedAttempt] = []
    # This lock only excludes other processes of this host. That is enough, because the files are on this host, and the
    # rows of a job are removed only by the host of the job's pool.
    with file_lock(lock_file("retention")):
        for job_id in _with_old_attempts(store, before):
            with store.reading() as session:
                rows = _rows(session, job_id)
                spec = session.scalar(select(Job.spec).where(Job.id == job_id).order_by(Job.attempt.desc()).limit(1))
                chosen = bool(((spec or {}).get("run_config") or {}).get("job_id"))
                old = unneeded(rows, _promoted(session, job_id), before=before, id_is_chosen=chosen)
            if old and not dry_run:
                try:
                    old = _remove(store, job_id, old, before, id_is_chosen=chosen)
                except (OSError, ShoalError) as error:
                    # An error with one job must not stop the removal of the other jobs.
                    log.warning("job %s could not be removed: %s", job_id, error)
                    continue
            removed += old
    return tuple(removed)


def unneeded(
    rows: Sequence[DeletedAttempt], promoted: Collection[int], *, before: float, id_is_chosen: bool
) -> list[DeletedAttempt]:
    """Return the attempts of a job that may be removed."""
    old = [row for row in rows if row.state in JOB_ENDED and row.ended_at < before and row.attempt not in promoted]
    if not id_is_chosen:
        return old if len(old) == len(rows) else []
    # The marker files in the folders of all attempts contain the time at which the first attempt was submitted. shoal
    # recognises the folders by this time, and reads it from the first attempt's row. Therefore the first attempt's row
    # is kept.
    return [row for row in old if row not in (rows[0], rows[-1])]


def _with_old_attempts(store: Store, before: float) -> list[str]:
    """Return the ids of jobs with an attempt that ended before the given time. Jobs of pools on other hosts, and of
    other teams, are left out."""
    ended = func.coalesce(Job.ended_at, Job.created_at)
    query = select(Job.id, Job.pool, Job.team).where(Job.state.in_(JOB_ENDED), ended < before).distinct()
    team = asking_team()
    with store.reading() as session:
        elsewhere = {pool.name for pool in session.scalars(select(Pool)) if not is_on_this_host(pool)}
        found = {
            job_id
            for job_id, pool, owner in session.execute(query)
            if pool not in elsewhere and may_change(owner, team)
        }
        return sorted(found)


def _rows(session: Session, job_id: str) -> list[DeletedAttempt]:
    ended = func.coalesce(Job.ended_at, Job.created_at)
    query = select(Job.id, Job.attempt, Job.state, ended).where(Job.id == job_id).order_by(Job.attempt)
    return [DeletedAttempt(*row) for row in session.execute(query)]


def _promoted(session: Session, job_id: str) -> set[int]:
    query = select(Promotion.attempt).where(Promotion.job_id == job_id, Promotion.state != PromotionState.WITHDRAWN)
    return set(session.scalars(query))


def _remove(
    store: Store, job_id: str, old: Sequence[DeletedAttempt], before: float, *, id_is_chosen: bool
) -> list[DeletedAttempt]:
    """Remove attempts of a job, and return the removed attempts.

    The rows are removed after the files, and in one transaction. If this process is killed before the transaction, the
    next call finds the rows again, and the markers in the folders still match the job's first row.
    """
    from shoal.jobs.files.database_files import remove_folder

    with act(RetentionStep.REMOVE_FILES):
        for row in old:
            key = Key(job_id, row.attempt)
            discard_staged(store, attempts.load(store, key))
            if key.submission_id in credentials.left():
                credentials.discard_all(key.submission_id)
            artifacts.remove(artifacts.folder(key, None), artifacts.claim_of(store, key))
        with suppress(OSError):  # the folder does not exist, or contains files of other attempts
            Path(artifacts.folder(Key(job_id, 1), None)).parent.rmdir()
    with transaction(store, RetentionStep.REMOVE_ROWS) as session:
        # A retry may have added an attempt meanwhile, so the unneeded attempts are determined again.
        now = unneeded(_rows(session, job_id), _promoted(session, job_id), before=before, id_is_chosen=id_is_chosen)
        removed = [row for row in old if row in now]
        for row in removed:
            session.delete(session.get_one(Job, (job_id, row.attempt)))
            metric_points.remove(session, Key(job_id, row.attempt))
            of_it = update(Promotion).filter_by(job_id=job_id, attempt=row.attempt)
            session.execute(of_it.values(attempt=None))  # it was withdrawn, and its row is kept
            remove_folder(session, artifacts.folder(Key(job_id, row.attempt), storage.IN_STORE))
        session.flush()
        study_logs.remove_unused(session, job_id)
        # The files of a training function belong to all attempts of the job.
        if not _rows(session, job_id):
            for kind in ("model", "checkpoints"):
                remove_folder(session, f"{storage.IN_STORE}/{kind}/{job_id}")
    return removed
