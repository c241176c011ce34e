"""Write and read the journals of searches for parameters, in the table `study_logs`.

A job's study belongs to the attempt that has begun it, and to the later attempts that continue it after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from shoal.errors import FencedError, InvalidArgumentError, StoreError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import StudyStep, transaction
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState, StudyLog

MAX_ENTRY_BYTES = 2**20
"""Largest size of one entry. Entries have a few hundred bytes; only user code could make long ones, by attributes."""


def append(store: Store, key: Key, study: int, entries: Sequence[str], expected: int | None) -> int:
    """Add entries to the journal of a study, and return the number of the next entry.

    The call may be repeated with the same `expected` if the reply of the database was lost.

    Args:
        store: Store that has the journal.
        key: Attempt that writes.
        study: Number of the attempt that has begun the study.
        entries: The entries as JSON.
        expected: Number that the first entry gets, as the last call has returned it; None: the next free number.

    Raises:
        FencedError: The attempt is not running, or is not the newest attempt of its job.
        InvalidArgumentError: An entry is too long.
    """
    if longest := max((len(entry) for entry in entries if len(entry) > MAX_ENTRY_BYTES), default=0):
        raise InvalidArgumentError(
            f"an entry of the study has {longest:,} bytes, but at most {MAX_ENTRY_BYTES:,} are allowed: give the study "
            "and its trials smaller parameters and attributes"
        )
    newest = select(Job.attempt, Job.state).where(Job.id == key.job_id).order_by(Job.attempt.desc()).limit(1)
    with transaction(store, StudyStep.APPEND) as session:
        if session.execute(newest).one_or_none() != (key.attempt, JobState.RUNNING):
            raise FencedError(
                f"attempt {key.attempt} of job {key.job_id} has ended, or a later attempt continues its study: this "
                "process may not change the study any more"
            )
        last = session.scalar(select(func.max(StudyLog.number)).where(*_in_study(key.job_id, study)))
        free = 0 if last is None else last + 1
        first = free if expected is None else expected
        if free == first + len(entries) and _entries(session, key.job_id, study, first) == list(entries):
            return free
        if free != first:
            raise StoreError(
                f"the study of job {key.job_id} has {free} entries instead of {first}: another process has changed the "
                "store's rows"
            )
        session.add_all(
            StudyLog(job_id=key.job_id, study=study, number=number, entry=entry)
            for number, entry in enumerate(entries, first)
        )
    return first + len(entries)


def read(store: Store, job_id: str, study: int, first: int = 0) -> list[str]:
    """Return the entries of a study's journal as JSON, beginning with the entry of the given number."""
    with store.reading(snapshot=False) as session:
        return _entries(session, job_id, study, first)


def study_of(store: Store, key: Key) -> int:
    """Return the number of the study that an attempt works on: that of an earlier attempt whose successors have all
    failed or were cancelled with the same spec, otherwise a study of its own."""
    attempts = select(Job.attempt, Job.state, Job.spec["fingerprint"].as_string()).where(Job.id == key.job_id)
    studies = select(StudyLog.study).where(StudyLog.job_id == key.job_id).distinct()
    with store.reading() as session:
        rows = session.execute(attempts.where(Job.attempt <= key.attempt).order_by(Job.attempt.desc())).all()
        begun = set(session.scalars(studies))
    if not rows:
        return key.attempt
    own, *earlier = rows
    unfinished = JOB_ENDED - {JobState.SUCCEEDED}
    equal = takewhile(lambda row: row[1] in unfinished and row[2] == own[2], earlier)
    return next((attempt for attempt in (key.attempt, *(row[0] for row in equal)) if attempt in begun), key.attempt)


def remove_unused(session: Session, job_id: str) -> None:
    """Remove the studies of a job of which no attempt is left: neither the one that began it nor one that continued."""
    left = set(session.scalars(select(Job.attempt).where(Job.id == job_id)))
    studies = sorted(session.scalars(select(StudyLog.study).where(StudyLog.job_id == job_id).distinct()))
    for study, following in pairwise((*studies, None)):
        assert study is not None, "only the last one has no successor"
        if not any(study <= attempt and (following is None or attempt < following) for attempt in left):
            session.execute(delete(StudyLog).where(*_in_study(job_id, study)))


def _entries(session: Session, job_id: str, study: int, first: int) -> list[str]:
    query = select(StudyLog.entry).where(*_in_study(job_id, study), StudyLog.number >= first)
    return list(session.scalars(query.order_by(StudyLog.number)))


def _in_study(job_id: str, study: int) -> tuple[ColumnElement[bool], ...]:
    return StudyLog.job_id == job_id, StudyLog.study == study
