"""Keep credentials out of a job's spec, and pass them from the submitter to the driver in a file or encrypted.

The store and Ray's job history keep a job's spec, and every user who may list jobs can read the spec there. Credentials
are therefore passed in a file of mode 0600, and the driver deletes the file right after reading it. For `ray://` pools
(existing Ray clusters), whose head may share no folder with the submitter, the credentials are encrypted for this
driver only and written into the attempt's row (:func:`receive`, :func:`deliver`). A file is faster, and the submitter
may end before the driver has started.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import select, update

from shoal.data.connections import (
    CATALOG_PREFIX,
    CONNECTION_PREFIX,
    STORAGE_PREFIX,
    connection_variable,
    parse_settings,
)
from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, patiently, transaction
from shoal.jobs.timeouts import CREDENTIALS_PATIENCE_S, CREDENTIALS_PERIOD_S
from shoal.own_pauses import waited_since
from shoal.secrets import redaction
from shoal.secrets.known_secrets import KnownSecrets, SecretStream
from shoal.state import Store
from shoal.state.home import subfolder
from shoal.state.schema import Job, JobState
from shoal.training.locations import absolute_database

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey


_ENVIRONMENT = re.compile(
    r"MLFLOW_TRACKING_(USERNAME|PASSWORD|TOKEN|INSECURE_TLS|SERVER_CERT_PATH)"
    r"|MLFLOW_S3_ENDPOINT_URL|AWS_[A-Z0-9_]+|GOOGLE_APPLICATION_CREDENTIALS|AZURE_[A-Z0-9_]+"
    r"|DATABRICKS_(HOST|TOKEN|USERNAME|PASSWORD|CLIENT_ID|CLIENT_SECRET|ACCOUNT_ID|AUTH_TYPE|INSECURE)"
    r"|DATABRICKS_(CONFIG_FILE|CONFIG_PROFILE|AZURE_RESOURCE_ID|WAREHOUSE_ID)"
    r"|SNOWFLAKE_(ACCOUNT|HOST|USER|PASSWORD|TOKEN|AUTHENTICATOR|PRIVATE_KEY\w*|ROLE|WAREHOUSE|DATABASE|SCHEMA)"
    r"|OTEL_(METRICS?_[A-Z_]+|EXPORTER_OTLP_[A-Z_]+|SERVICE_NAME|RESOURCE_ATTRIBUTES|SDK_DISABLED)"
)
"""Names of the environment variables that are passed from the submitter to the driver. These variables are settings for
storage, databases, tracking servers and metrics. Other variables of Databricks, such as DATABRICKS_RUNTIME_VERSION, are
not passed: they describe the submitter's machine, and libraries on a node would take them for a description of the
node."""

_SECRET_NAME = re.compile("PASSWORD|TOKEN|SECRET|KEY|CONNECTION_STRING|SAS")
"""Pattern that matches the names of variables whose values are secret. A variable such as AWS_REGION does not match, so
that its value stays readable in logs."""

_REFUSED = re.compile(
    r"expired|invalid.?token|access.?denied|permission denied|unauthori[sz]ed|forbidden|credential|authentication"
    r"|\b40[13]\b",
    re.IGNORECASE,
)
"""Pattern that matches the messages with which storages, databases and tracking servers refuse credentials."""

_SHORTEST_SESSION_S = 900.0
"""Shortest lifetime of temporary credentials in seconds, which is that of an AWS session. Credentials that are younger
than this have not expired."""


@dataclass(frozen=True)
class Secrets:
    """Credentials that a job needs, but that its spec must not contain.

    Attributes:
        environment: Environment variables for the driver, by name.
        uris: Original values that were removed from the spec, by JSON pointer (their place in the spec).
        named: Names of the variables that the spec declares as secrets (`secret_env`).
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()

    def redact(self, text: str) -> str:
        """Return a copy of a text in which this job's credentials, and all parts that look like credentials, are
        hidden."""
        return redaction.redact(self.known.hide(self._without_uris(text)))

    def stream(self) -> OutputFilter:
        """Return a filter that hides the same in output that arrives in chunks."""
        return OutputFilter(self.known, self._without_uris)

    def _without_uris(self, text: str) -> str:
        for uri in self.uris.values():
            text = text.replace(uri, redaction.redact_value(uri))
        return text

    @cached_property
    def known(self) -> KnownSecrets:
        """The values that are hidden, with their parts and forms."""
        return KnownSecrets(self.values)

    @cached_property
    def values(self) -> frozenset[str]:
        """The values that are hidden."""
        named = {value for name, value in self.environment.items() if name in self.named or _SECRET_NAME.search(name)}
        # `hide` removes a value for one of two reasons: the value contains a credential, or its key is a word such as
        # "password". In the second case the whole value is a secret.
        parts = [redaction.secrets_in(uri) or {uri} for uri in self.uris.values()]
        prefixes = (CONNECTION_PREFIX, STORAGE_PREFIX, CATALOG_PREFIX)
        parts += [redaction.secrets_in(url) for name, url in self.environment.items() if name.startswith(prefixes)]
        # The property "credential" of a catalog is ID:SECRET.
        parts += [{secret.partition(":")[2] for secret in found} for found in parts]
        return frozenset(named.union(*parts)) - {""}

    def variables(self, hidden: tuple[str, ...] = (CONNECTION_PREFIX, CATALOG_PREFIX)) -> dict[str, str]:
        """Return the environment variables for the workers. Database URLs and the properties of catalogs are hidden,
        because only the driver uses them."""
        return {name: value for name, value in self.environment.items() if not name.startswith(hidden)}

    @property
    def given(self) -> bool:
        """Return whether there are any credentials."""
        return bool(self.environment or self.uris)

    def dumps(self) -> bytes:
        """Return the credentials as JSON, for the driver."""
        content = {"environment": dict(self.environment), "uris": dict(self.uris), "named": sorted(self.named)}
        return json.dumps(content).encode()

    @classmethod
    def loads(cls, content: str | bytes) -> Self:
        """Build the credentials from the result of :meth:`dumps`."""
        found = json.loads(content)
        return cls(found["environment"], found["uris"], frozenset(found["named"]))

    # A traceback may print the result of `__repr__`, so the result contains no values.
    def __repr__(self) -> str:
        return f"Secrets({len(self.environment)} variables, {len(self.uris)} URIs)"


class OutputFilter:
    """Filter that hides credentials in output that arrives in chunks.

    Args:
        known: The credentials.
        without_uris: Function that removes the credentials from the spec's URIs in a text.
    """

    def __init__(self, known: KnownSecrets, without_uris: Callable[[str], str]) -> None:
        self._stream = SecretStream(known)
        self._without_uris = without_uris

    def feed(self, chunk: str) -> str:
        """Take the next chunk, and return the text that is complete, without credentials."""
        return redaction.redact(self._stream.feed(self._without_uris(chunk)))

    def end(self) -> str:
        """Return the rest of the text, without credentials."""
        return redaction.redact(self._stream.end())


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the submitter's environment variables that the driver needs, such as settings for storage and MLflow."""
    return {name: value for name, value in environment.items() if value and _ENVIRONMENT.fullmatch(name)}


def secrets_of(
    names: Iterable[str], environment: Mapping[str, str], secret_of: Callable[[str], str | None] | None = None
) -> dict[str, str]:
    """Return the values of the variables that a spec names in `secret_env`.

    Args:
        names: Names of the variables.
        environment: Environment of this process.
        secret_of: Function that returns the value of a variable that is not in the environment; None if it has none.
    """
    values = {name: environment.get(name) or (secret_of(name) if secret_of else None) or "" for name in names}
    if missing := [name for name, value in values.items() if not value]:
        raise InvalidArgumentError(
            f"run_config.secret_env names {', '.join(missing)}, but this process has no such environment variable: set "
            "each of these variables, store it as an Airflow Variable or a Prefect Secret block, or remove its name "
            "from secret_env"
        )
    return values


_EXAMPLES = {
    CONNECTION_PREFIX: "the SQLAlchemy URL of the connection, such as postgresql+psycopg://USER:PASSWORD@HOST/DATABASE",
    STORAGE_PREFIX: 'its settings, such as {"aws_access_key_id": "...", "aws_secret_access_key": "..."}',
}


def connections(
    names: Iterable[tuple[str, str]],
    environment: Mapping[str, str],
    url_of: Callable[[str], str | None] | None = None,
) -> dict[str, str]:
    """Find the URLs of the database connections, and the settings of storages and catalogs, that a spec names.

    Args:
        names: Prefix of the environment variable and name of each, as from `DatasetSpec.connections`.
        environment: Environment of this process.
        url_of: Function that returns the URL or the settings of a name that has no variable; None if there are none.

    Returns:
        Values of environment variables. A catalog without settings is left out: pyiceberg's configuration has it.
    """
    found: dict[str, str] = {}
    named: dict[str, str] = {}
    for prefix, name in dict.fromkeys(names):
        variable = connection_variable(name, prefix)
        if named.setdefault(variable, name) != name:
            raise InvalidArgumentError(
                f'the connections "{named[variable]}" and "{name}" of the spec take their URL from the same '
                f"environment variable, {variable}: rename one of the connections"
            )
        url = environment.get(variable) or (url_of(name) if url_of else None)
        if prefix == CATALOG_PREFIX and (not url or (variable not in environment and not url.startswith("{"))):
            continue  # an Airflow connection of this name that is no catalog
        if not url:
            raise InvalidArgumentError(
                f'the connection "{name}" of a dataset is not known: set the environment variable {variable} to '
                f"{_EXAMPLES[prefix]}, or create an Airflow connection or a Prefect Secret block of this name"
            )
        is_database = prefix == CONNECTION_PREFIX
        found[variable] = absolute_database(url) if is_database else json.dumps(parse_settings(variable, url))
    return found


def hide(document: Any) -> tuple[Any, dict[str, str]]:
    """Remove credentials from a JSON document: credentials inside texts, and the values of keys such as "password"."""
    found: dict[str, str] = {}

    def leaf(name: str, value: Any, place: str) -> Any:
        if not isinstance(value, str):
            return value
        shown = redaction.HIDDEN if value and redaction.is_secret_name(name) else redaction.redact_value(value)
        if shown != value:
            found[place] = value
        return shown

    return _mapped(document, leaf), found


def reveal(document: Any, uris: Mapping[str, str]) -> Any:
    """Undo :func:`hide`: return a copy of the document with its credentials."""
    return _mapped(document, lambda _name, value, place: uris.get(place, value))


def _mapped(value: Any, leaf: Callable[[str, Any, str], Any], place: str = "", name: str = "") -> Any:
    """Apply `leaf` to each text, number, boolean and null in a JSON document, and return the new document."""
    if isinstance(value, dict):
        return {key: _mapped(item, leaf, f"{place}/{_step(key)}", key) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, leaf, f"{place}/{index}") for index, item in enumerate(value)]
    return leaf(name, value, place)


def _step(key: str) -> str:
    """Escape the characters "~" and "/" in a key, so that the key can be a part of a JSON pointer."""
    if redaction.has_credentials(key):
        raise InvalidArgumentError(
            f'the key "{redaction.redact_value(key)}" in the spec contains credentials: put credentials only into '
            "values, because shoal removes them from values, but not from keys, before it stores the spec"
        )
    return key.replace("~", "~0").replace("/", "~1")


def expiry_hint(error: str, waited_s: float) -> str:
    """Return a sentence that warns of expired credentials if they may be the cause of an error; otherwise an empty
    text.
    """
    if waited_s <= _SHORTEST_SESSION_S or not _REFUSED.search(error):
        return ""
    return (
        f". The job waited {waited_s / 60:.0f} minutes in the queue, and the credentials from its submission may have "
        "expired in this time: submit the job again with new credentials"
    )


def hand_over(submission_id: str, secrets: Secrets) -> None:
    """Write the credentials for the driver of an attempt into a file; if there are no credentials, write no file.

    If another process has already written the file for the same attempt, that file is kept.
    """
    if not secrets.given:
        return
    path = _path(submission_id)
    # The temporary file has mode 0600 from the start, so that there is no moment when other users can read it.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{submission_id}.") as file:
        file.write(secrets.dumps())
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def take(submission_id: str) -> Secrets:
    """Read the credentials that the submitter wrote for an attempt, delete their file, and return them.

    If there is no such file, the result has no credentials.
    """
    path = _path(submission_id)
    try:
        secrets = Secrets.loads(path.read_bytes())
    except FileNotFoundError:
        return Secrets()
    discard(submission_id)
    return secrets


def discard(submission_id: str) -> None:
    """Delete the file with an attempt's credentials. Do nothing if the driver has already deleted the file."""
    _path(submission_id).unlink(missing_ok=True)


def left() -> set[str]:
    """Return the ids of the submissions that still have a file with credentials, complete or half-written."""
    return {path.name.rpartition(".")[0] for path in subfolder("credentials").iterdir()}


def discard_all(submission_id: str) -> None:
    """Delete all credentials files of an ended submission, also the incomplete files that killed processes have
    left."""
    for path in subfolder("credentials").iterdir():
        if path.name.rpartition(".")[0] == submission_id:
            path.unlink(missing_ok=True)


def _path(submission_id: str) -> Path:
    return subfolder("credentials") / f"{submission_id}.json"


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
    job = store.get(Job, (key.job_id, key.attempt))
    if job is None or job.state is not JobState.PENDING or not job.needs_credentials:
        return None
    driver_key = DriverKey()
    if not patiently(store, lambda: ask_for_credentials(store, key, driver_key.public)):
        raise AttemptTakenError(_TAKEN)
    began = monotonic()
    while waited_since(began, monotonic()) < CREDENTIALS_PATIENCE_S:
        if (found := patiently(store, lambda: sealed_for(store, key, driver_key.public))) is None:
            raise AttemptTakenError(_TAKEN)
        if found:
            return Secrets.loads(driver_key.open(found, key.submission_id))
        sleep(CREDENTIALS_PERIOD_S)
    raise JobError(
        f"the driver has waited {CREDENTIALS_PATIENCE_S / 60:.0f} minutes for the job's credentials, but no process "
        "has sent them. The process that waits for the job must send them, but has ended or cannot reach the store. "
        "Submit the job again, and let the submitting process run until the job has started"
    )


def deliver(store: Store, job: Job, secrets: Secrets) -> None:
    """Encrypt the credentials of an attempt and write them into its row, if its driver has asked for them."""
    if job.state is JobState.PENDING and job.driver_key is not None and job.sealed_credentials is None:
        key = Key(job.id, job.attempt)
        send_credentials(store, key, job.driver_key, seal(secrets.dumps(), job.driver_key, key.submission_id))


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
        """Decrypt a message that :func:`seal` has encrypted for this driver."""
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
    """Encrypt a text so that only one driver can decrypt it."""
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
