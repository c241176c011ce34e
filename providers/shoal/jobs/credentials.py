"""Keep credentials out of a job's spec, and pass them from the submitter to the driver in a file.

The store and Ray's job history keep a job's spec, and every user who may list jobs can read the spec there. Credentials
are therefore passed in a file of mode 0600, and the driver deletes the file right after reading it. For `ray://` pools
(existing Ray clusters), no file is used: the credentials are encrypted and written into the store
(`shoal.jobs.remote.sealed_credentials`).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shoal.data.sql import CONNECTION_PREFIX, connection_variable
from shoal.errors import InvalidArgumentError
from shoal.secrets import redaction
from shoal.secrets.known_secrets import KnownSecrets, SecretStream
from shoal.state.home import subfolder
from shoal.training.locations import absolute_database

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
        parts += [redaction.secrets_in(url) for name, url in self.environment.items() if _is_connection(name)]
        return frozenset(named.union(*parts))

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the workers. Database URLs are left out, because only the driver uses
        them."""
        return {name: value for name, value in self.environment.items() if not _is_connection(name)}

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

    Raises:
        InvalidArgumentError: A variable is not set.
    """
    values = {name: environment.get(name) or (secret_of(name) if secret_of else None) or "" for name in names}
    if missing := [name for name, value in values.items() if not value]:
        raise InvalidArgumentError(
            f"run_config.secret_env names {', '.join(missing)}, but this process has no such environment variable: set "
            "each of these variables, store it as an Airflow Variable or a Prefect Secret block, or remove its name "
            "from secret_env"
        )
    return values


def connections(
    names: Iterable[str], environment: Mapping[str, str], url_of: Callable[[str], str | None] | None = None
) -> dict[str, str]:
    """Find the URLs of the database connections that a spec names.

    Raises:
        InvalidArgumentError: There is no URL for a connection, or two connections have the same environment variable.
    """
    found: dict[str, str] = {}
    named: dict[str, str] = {}
    for name in dict.fromkeys(names):
        variable = connection_variable(name)
        if named.setdefault(variable, name) != name:
            raise InvalidArgumentError(
                f'the connections "{named[variable]}" and "{name}" of the spec take their URL from the same '
                f"environment variable, {variable}: rename one of the connections"
            )
        url = environment.get(variable) or (url_of(name) if url_of else None)
        if not url:
            raise InvalidArgumentError(
                f'the connection "{name}" of a dataset is not known: set the environment variable {variable} to '
                "the SQLAlchemy URL of the connection, such as postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, or "
                "create an Airflow connection or a Prefect Secret block of this name"
            )
        found[variable] = absolute_database(url)
    return found


def _is_connection(name: str) -> bool:
    return name.startswith(CONNECTION_PREFIX)


def hide(document: Any) -> tuple[Any, dict[str, str]]:
    """Remove credentials from a JSON document: credentials inside texts, and the values of keys such as "password".

    Raises:
        InvalidArgumentError: A name in the document contains credentials.
    """
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
    # mkstemp creates the file with mode 0600 from the start, so that there is no moment when other users can read it.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{submission_id}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.dumps())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()


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
    with suppress(FileNotFoundError):
        _path(submission_id).unlink()


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
