"""Keep credentials out of a job's spec, and hand them from the submitter to the driver by file.

A job's spec stands in the store and in Ray's own history, where anyone who may look at jobs can read it. What is secret
goes through a 0600 file that the driver deletes as soon as it has read it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal import redaction
from shoal.errors import InvalidArgumentError
from shoal.state.home import subfolder

_ENVIRONMENT = re.compile(
    r"MLFLOW_TRACKING_(USERNAME|PASSWORD|TOKEN|INSECURE_TLS|SERVER_CERT_PATH)"
    r"|MLFLOW_S3_ENDPOINT_URL|AWS_[A-Z0-9_]+|GOOGLE_APPLICATION_CREDENTIALS|AZURE_[A-Z0-9_]+"
)
"""What the driver is given of the submitter's environment: credentials for storage and tracking, and nothing else."""

_SECRET_NAME = re.compile("PASSWORD|TOKEN|SECRET|KEY|CONNECTION_STRING|SAS")
"""Variables whose values are secret themselves, unlike a region's name."""

_SHORTEST_SECRET = 6
"""Shorter ones are not searched for in a log: they would be found in the middle of words."""


@dataclass(frozen=True)
class Secrets:
    """What a job needs and its spec must not say."""

    environment: Mapping[str, str] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)  # place in the spec -> the value as it was given

    def redact(self, text: str) -> str:
        """Take these, and every other credential that can be recognised, out of a text."""
        for uri in self.uris.values():
            text = text.replace(uri, without_credentials(uri))
        for word in sorted(self._words, key=len, reverse=True):
            text = text.replace(word, redaction.HIDDEN)
        return redaction.redact(text)

    @cached_property
    def _words(self) -> frozenset[str]:
        named = {value for name, value in self.environment.items() if _SECRET_NAME.search(name)}
        # A value without a recognisable credential was hidden for its name: all of it is the secret.
        parts = (redaction.secrets_in(uri) or {uri} for uri in self.uris.values())
        return frozenset(word for word in named.union(*parts) if len(word) >= _SHORTEST_SECRET)

    def __repr__(self) -> str:  # a traceback that shows locals must not show these
        return f"Secrets({len(self.environment)} variables, {len(self.uris)} URIs)"


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the submitter's environment that the driver needs."""
    return {name: value for name, value in environment.items() if value and _ENVIRONMENT.fullmatch(name)}


def hide(document: Any) -> tuple[Any, dict[str, str]]:
    """Take the credentials out of a JSON document: those in its texts, and the values that have a secret name.

    Returns:
        The document without them, and the values as they were by their place in it, a JSON pointer (RFC 6901).

    Raises:
        InvalidArgumentError: A name in the document has credentials in it.
    """
    found: dict[str, str] = {}

    def leaf(name: str, value: Any, place: str) -> Any:
        if not isinstance(value, str):
            return value
        shown = redaction.HIDDEN if value and redaction.is_secret_name(name) else without_credentials(value)
        if shown != value:
            found[place] = value
        return shown

    return _mapped(document, leaf), found


def reveal(document: Any, uris: Mapping[str, str]) -> Any:
    """The reverse of :func:`hide`."""
    return _mapped(document, lambda _name, value, place: uris.get(place, value))


def without_credentials(uri: str) -> str:
    """A URI as it may be shown."""
    return redaction.redact_value(uri)


def _mapped(value: Any, leaf: Callable[[str, Any, str], Any], place: str = "", name: str = "") -> Any:
    """Copy a JSON document; `leaf` makes each of its plain values from name, value and place."""
    if isinstance(value, dict):
        return {key: _mapped(item, leaf, f"{place}/{_step(key)}", key) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, leaf, f"{place}/{index}") for index, item in enumerate(value)]
    return leaf(name, value, place)


def _step(key: str) -> str:
    """A name as a part of a JSON pointer."""
    if redaction.has_credentials(key):
        raise InvalidArgumentError(
            f'the name "{redaction.redact_value(key)}" has credentials in it: put them into a value, where they are '
            "kept out of the store"
        )
    return key.replace("~", "~0").replace("/", "~1")


def hand_over(submission_id: str, secrets: Secrets) -> None:
    """Write what the driver of this attempt will take; nothing is written when there is nothing to say.

    Where another process submits the same attempt, the file of the first one stays.
    """
    if not secrets.environment and not secrets.uris:
        return
    path = _path(submission_id)
    # Made with its mode, not changed to it: there is no instant at which others can read it.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{submission_id}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"environment": dict(secrets.environment), "uris": dict(secrets.uris)}, file)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()


def take(submission_id: str) -> Secrets:
    """Read what the submitter left for this attempt, and delete it."""
    path = _path(submission_id)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return Secrets()
    discard(submission_id)
    return Secrets(content["environment"], content["uris"])


def discard(submission_id: str) -> None:
    """Delete what no driver has taken."""
    with suppress(FileNotFoundError):
        _path(submission_id).unlink()


def left() -> set[str]:
    """Ids of the submissions that have a file here, be it half written."""
    return {path.name.rpartition(".")[0] for path in subfolder("credentials").iterdir()}


def discard_all(submission_id: str) -> None:
    """Delete the files of a submission that has ended, those too that a killed process has half written."""
    for path in subfolder("credentials").iterdir():
        if path.name.rpartition(".")[0] == submission_id:
            path.unlink(missing_ok=True)


def _path(submission_id: str) -> Path:
    return subfolder("credentials") / f"{submission_id}.json"
