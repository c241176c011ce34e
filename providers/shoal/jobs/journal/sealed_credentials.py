"""Pass credentials to a driver through columns of the attempt's row (see `shoal.jobs.remote`)."""

from __future__ import annotations

from sqlalchemy import select, update

from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.state import Store
from shoal.state.schema import Job, JobState


def is_needed(store: Store, key: Key) -> bool:
    """Return whether the driver of a pending attempt gets its credentials through the attempt's row in the store."""
    query = select(Job.needs_credentials).where(Job.id == key.job_id, Job.attempt == key.attempt)
    with store.reading(snapshot=False) as session:
        return bool(session.scalar(query.where(Job.state == JobState.PENDING)))


def ask_for_credentials(store: Store, key: Key, driver_key: str) -> bool:
    """Write the public key of an attempt's driver into the row; return False if the attempt is not pending.

    Credentials that were encrypted for another driver of the attempt are removed, because this driver cannot read them.
    """
    with transaction(store, JobStep.TAKE) as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or job.state is not JobState.PENDING:
            return False
        job.driver_key, job.sealed_credentials = driver_key, None
        return True


def sealed_for(store: Store, key: Key, driver_key: str) -> str | None:
    """Return the encrypted credentials of a pending attempt, or an empty text if no process has sent them yet.

    The result is None if the attempt is not pending any more, or if another driver has asked for the credentials in the
    meantime.
    """
    query = select(Job.state, Job.driver_key, Job.sealed_credentials)
    with store.reading(snapshot=False) as session:
        row = session.execute(query.where(Job.id == key.job_id, Job.attempt == key.attempt)).one_or_none()
    if row is None or row.state is not JobState.PENDING or row.driver_key != driver_key:
        return None
    return row.sealed_credentials or ""


def send_credentials(store: Store, key: Key, driver_key: str, sealed: str) -> bool:
    """Write encrypted credentials into the row of a pending attempt; return False if the driver does not need them."""
    of_driver = (Job.state == JobState.PENDING, Job.driver_key == driver_key, Job.sealed_credentials.is_(None))
    sends = update(Job).where(Job.id == key.job_id, Job.attempt == key.attempt, *of_driver)
    with transaction(store, JobStep.HAND_OVER) as session:
        done = session.execute(sends.values(sealed_credentials=sealed).execution_options(synchronize_session=False))
        return bool(done.rowcount)  # type: ignore[attr-defined]
