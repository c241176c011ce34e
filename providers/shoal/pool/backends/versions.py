"""Record the versions of the software on a pool's nodes, and refuse callers with incompatible versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import InvalidArgumentError

_KEY_PREFIX = "version:"
"""Prefix of the keys for software versions in the database row of a head."""

_DISTRIBUTIONS = {"shoal": ("shoal",), **{name: each.distributions for name, each in BOOSTING_LIBRARIES.items()}}
_TITLES = {"python": "Python", "shoal": "shoal", **{name: each.title for name, each in BOOSTING_LIBRARIES.items()}}


TESTED_RAY = "2.60"
"""Minor release of Ray with which this release of shoal is tested. Local pools start their nodes with Ray's private
API, which may change with any minor release."""


def untested_ray() -> str | None:
    """Return a warning if the installed minor release of Ray is not the one with which shoal is tested.

    The result is None if the tested release is installed, or if Ray is not installed.
    """
    found = installed("ray")
    if found is None or minor(found) == TESTED_RAY:
        return None
    return (
        f"local pools are tested with Ray {TESTED_RAY}, and Ray {found} is installed: if nodes do not start, run "
        f'`pip install "ray[default]~={TESTED_RAY}.0"`'
    )


def mine() -> dict[str, str]:
    """Return the versions of Python, shoal and the training libraries in this process, and the folder of its Python
    environment."""
    each = ((title, installed(name)) for title, names in _DISTRIBUTIONS.items() for name in names)
    found = {title: version for title, version in each if version is not None}
    return {"python": platform.python_version(), **found, "prefix": sys.prefix}


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def to_record(found: Mapping[str, str]) -> dict[str, str]:
    """Convert software versions to entries of a head's `endpoint`: add a prefix to each name."""
    return {_KEY_PREFIX + name: version for name, version in found.items()}


def recorded(head: Mapping[str, str]) -> dict[str, str]:
    """Return the software versions in the database row of a pool's head. The result is empty if an earlier version of
    shoal has written the row."""
    return {name.removeprefix(_KEY_PREFIX): version for name, version in head.items() if name.startswith(_KEY_PREFIX)}


def check(pool: str, theirs: Mapping[str, str], library: str | None = None) -> None:
    """Raise an error if the software versions of this process do not match those of the pool's nodes. Unknown versions
    are not checked.

    Raises:
        InvalidArgumentError: The minor version of Python, of shoal or of the library differs.
    """
    # If the pool uses the same Python environment as this process, the pool's new processes import the same packages as
    # this process, even after an upgrade. So the recorded versions are not compared.
    if theirs.get("prefix") == sys.prefix:
        return
    ours = mine()
    for name in ("python", "shoal", *([library] if library else [])):
        if name in theirs and name in ours and minor(theirs[name]) != minor(ours[name]):
            what = _TITLES[name]
            raise InvalidArgumentError(
                f'pool "{pool}" runs {what} {theirs[name]}, but this process runs {what} {ours[name]}: use an '
                f"environment with {what} {minor(theirs[name])}, or start the pool again with {what} "
                f"{minor(ours[name])}"
            )


def minor(version: str) -> str:
    """Return the first two numbers of a version, such as 3.12."""
    return ".".join(version.split(".")[:2])
