"""Pass the credentials of an attempt to its driver through the attempt's row, encrypted for this driver only.

This way is used only for `ray://` pools (existing Ray clusters), because the head of such a pool may share no folder
with the submitter. The drivers of local pools read a file instead (`shoal.jobs.credentials`). A file is faster, and the
submitter may end before the driver has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.errors import JobError
from shoal.jobs.credentials import Secrets
from shoal.jobs.journal import sealed_credentials
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.store_outages import patiently
from shoal.jobs.remote.sealing import DriverKey, seal
from shoal.jobs.timeouts import CREDENTIALS_PATIENCE_S, CREDENTIALS_PERIOD_S
from shoal.state import Store
from shoal.state.schema import Job, JobState

_TAKEN = "the attempt has ended, or another driver runs it"


class AttemptTakenError(JobError):
    """Error for a driver whose attempt has ended, is running already, or was taken over by another driver."""


def receive(
    store: Store,
    key: Key,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Secrets | None:
    """Ask for the credentials of a pending attempt, and wait until a process has sent them.

    The credentials stay in the row until the attempt is recorded as running or as ended.

    Returns:
        The credentials; None if the job needs no credentials from the row.

    Raises:
        AttemptTakenError: The attempt is not pending any more, or another driver has asked for its credentials. A
            driver that gets this error must exit, because it would run the job without credentials.
        JobError: No process has sent the credentials in time, or they were not encrypted for this driver.
    """
    if not sealed_credentials.is_needed(store, key):
        return None
    driver_key = DriverKey()
    if not patiently(store, lambda: sealed_credentials.ask_for_credentials(store, key, driver_key.public)):
        raise AttemptTakenError(_TAKEN)
    until = monotonic() + CREDENTIALS_PATIENCE_S
    while monotonic() < until:
        found = patiently(store, lambda: sealed_credentials.sealed_for(store, key, driver_key.public))
        if found is None:
            raise AttemptTakenError(_TAKEN)
        if found:
            return Secrets.loads(driver_key.open(found, key.submission_id))
        sleep(CREDENTIALS_PERIOD_S)
    raise JobError(
        f"the driver has waited {CREDENTIALS_PATIENCE_S / 60:.0f} minutes for the job's credentials, but no process "
        "has sent them. The process that waits for the job must send them, but has ended or cannot reach the store. "
        "Submit the job again, and let the submitting process run until the job has started"
    )


def deliver(store: Store, job: Job, secrets: Secrets) -> bool:
    """Encrypt the credentials of an attempt and write them into its row, if its driver has asked for them.

    Raises:
        JobError: The driver's key is not valid.
    """
    if job.state is not JobState.PENDING or job.driver_key is None or job.sealed_credentials is not None:
        return False
    key = Key(job.id, job.attempt)
    return sealed_credentials.send_credentials(
        store, key, job.driver_key, seal(secrets.dumps(), job.driver_key, key.submission_id)
    )
