"""Keeps credentials out of a job's spec: out of its URIs, and from the submitter's environment to the driver by file.

A job's spec stands in the store and in Ray's own history, where anyone who may look at jobs can read it. What is secret
goes through a 0600 file that the driver deletes as soon as it has read it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.state.home import subfolder

_ENVIRONMENT = re.compile(
    r"MLFLOW_TRACKING_(USERNAME|PASSWORD|TOKEN|INSECURE_TLS|SERVER_CERT_PATH)"
    r"|MLFLOW_S3_ENDPOINT_URL|AWS_[A-Z0-9_]+|GOOGLE_APPLICATION_CREDENTIALS|AZURE_[A-Z0-9_]+"
)
"""What the driver is given of the submitter's environment: credentials for storage and tracking, and nothing else."""

_URI_WITH_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/?#\s]*:[^/?#\s]*)@(?P<rest>\S*)")


_SECRET_NAME = re.compile("PASSWORD|TOKEN|SECRET|KEY|CONNECTION_STRING|SAS")
"""Variables whose values are secret themselves, unlike a region's name."""

_SHORTEST_SECRET = 6
"""Shorter ones are not searched for in a log: they would be found in the middle of words."""


@dataclass(frozen=True)
class Secrets:
    """What a job needs and its spec must not say."""

    environment: Mapping[str, str] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)  # place in the spec -> the URI as it was given

    def redact(self, text: str) -> str:
        """A text that any of these got into, without them."""
        for uri in self.uris.values():
            text = text.replace(uri, without_credentials(uri))
        for value in self._words():
            text = text.replace(value, "***")
        return text

    def _words(self) -> Iterator[str]:
        yield from (
            value
            for name, value in self.environment.items()
            if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
        )
        for uri in self.uris.values():
            match = _URI_WITH_USER.fullmatch(uri)
            password = match["user"].partition(":")[2] if match else ""
            if len(password) >= _SHORTEST_SECRET:
                yield password

    def __repr__(self) -> str:  # a traceback that shows locals must not show these
        return f"Secrets({len(self.environment)} variables, {len(self.uris)} URIs)"


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the submitter's environment that the driver needs."""
    return {name: value for name, value in environment.items() if value and _ENVIRONMENT.fullmatch(name)}


def hide(document: Any) -> tuple[Any, dict[str, str]]:
    """Take ``user:password@`` out of every URI of a JSON document.

    Returns:
        The document without them, and the URIs as they were, by their place in it (``/tracking/uri``).
    """
    found: dict[str, str] = {}

    def walk(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{place}/{index}") for index, item in enumerate(value)]
        if isinstance(value, str) and (match := _URI_WITH_USER.fullmatch(value)):
            found[place] = value
            return match["scheme"] + match["rest"]
        return value

    return walk(document, ""), found


def reveal(document: Any, uris: Mapping[str, str]) -> Any:
    """The reverse of :func:`hide`."""

    def walk(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{place}/{index}") for index, item in enumerate(value)]
        return uris.get(place, value)

    return walk(document, "")


def without_credentials(uri: str) -> str:
    """A URI as it may be shown."""
    shown = hide(uri)[0]
    assert isinstance(shown, str)
    return shown


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
