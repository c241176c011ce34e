"""Pass the credentials of an attempt to its driver through the attempt's row, encrypted for this driver only.

This way is used only for `ray://` pools (existing Ray clusters), because the head of such a pool may share no folder
with the submitter. The drivers of local pools read a file instead (`shoal.jobs.credentials`). A file is faster, and the
submitter may end before the driver has started.
"""

from __future__ import annotations

import binascii
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import select, update

from shoal.errors import JobError
from shoal.jobs.credentials import Secrets
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, patiently, transaction
from shoal.jobs.timeouts import CREDENTIALS_PATIENCE_S, CREDENTIALS_PERIOD_S
from shoal.own_pauses import waited_since
from shoal.state import Store
from shoal.state.schema import Job, JobState

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey


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
    if not is_needed(store, key):
        return None
    driver_key = DriverKey()
    if not patiently(store, lambda: ask_for_credentials(store, key, driver_key.public)):
        raise AttemptTakenError(_TAKEN)
    began = monotonic()
    while waited_since(began, monotonic()) < CREDENTIALS_PATIENCE_S:
        found = patiently(store, lambda: sealed_for(store, key, driver_key.public))
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
    return send_credentials(store, key, job.driver_key, seal(secrets.dumps(), job.driver_key, key.submission_id))


_PURPOSE = b"shoal credentials 1"
_KEY_BYTES = 32
_NONCE_BYTES = 12


class SealError(JobError):
    """Error for encrypted credentials that are for another attempt or another driver, or that were changed."""


class DriverKey:
    """Key pair of one driver. The private key exists only in this object.

    Attributes:
        public: The public key, as text for the attempt's row.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = b64encode(self._private.public_key().public_bytes_raw()).decode()

    def open(self, sealed: str, submission_id: str) -> bytes:
        """Decrypt a message that :func:`seal` has encrypted for this driver.

        Raises:
            SealError: The message is for another attempt or another driver, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            message = b64decode(sealed, validate=True)
            sender, nonce = message[:_KEY_BYTES], message[_KEY_BYTES : _KEY_BYTES + _NONCE_BYTES]
            bound = _bound(submission_id, sender, b64decode(self.public))
            key = _key(self._private, X25519PublicKey.from_public_bytes(sender), bound)
            return AESGCM(key).decrypt(nonce, message[_KEY_BYTES + _NONCE_BYTES :], bound)
        except (InvalidTag, ValueError, binascii.Error):
            raise SealError(
                "the credentials in the attempt's row were not encrypted for this attempt and this driver, or were "
                "changed: find out which process writes to the store, and submit the job again"
            ) from None


def seal(content: bytes, driver_key: str, submission_id: str) -> str:
    """Encrypt a text so that only one driver can decrypt it.

    Raises:
        SealError: The row contains no valid key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        receiver = b64decode(driver_key, validate=True)
        public = X25519PublicKey.from_public_bytes(receiver)
        own = X25519PrivateKey.generate()
        sender = own.public_key().public_bytes_raw()
        bound = _bound(submission_id, sender, receiver)
        key = _key(own, public, bound)
    except (ValueError, binascii.Error):
        raise SealError("the attempt's row contains no valid driver key: submit the job again") from None
    nonce = os.urandom(_NONCE_BYTES)
    return b64encode(sender + nonce + AESGCM(key).encrypt(nonce, content, bound)).decode()


def _key(own: X25519PrivateKey, other: X25519PublicKey, bound: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=bound).derive(own.exchange(other))


def _bound(submission_id: str, sender: bytes, receiver: bytes) -> bytes:
    """Return the data that AES-GCM authenticates with a message: the attempt's id, and the public keys of sender and
    driver."""
    return _PURPOSE + sender + receiver + submission_id.encode()
