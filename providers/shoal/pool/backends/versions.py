"""Versions of the software on a pool's nodes, by which a caller that does not fit the pool is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata

from shoal.errors import InvalidArgumentError

_FRONT = "version:"
"""First part of the keys under which a head's row contains the versions."""

_DISTRIBUTIONS = {"xgboost": ("xgboost", "xgboost-cpu"), "lightgbm": ("lightgbm",)}
_TITLES = {"python": "Python", "shoal": "shoal", "xgboost": "XGBoost", "lightgbm": "LightGBM"}


def mine() -> dict[str, str]:
    """Return the versions of this process: Python and shoal (major and minor), libraries, and the folder of Python."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "shoal": _minor(metadata.version("shoal"))}
    for library, names in _DISTRIBUTIONS.items():
        for name in names:
            try:
                found[library] = _minor(metadata.version(name))
            except metadata.PackageNotFoundError:
                continue
    return {**found, "prefix": sys.prefix}


def to_record() -> dict[str, str]:
    """Return the versions of this process as entries for the row of a pool's head."""
    return {_FRONT + name: version for name, version in mine().items()}


def recorded(head: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that the row of a pool's head contains; none if an earlier version of shoal wrote the row."""
    return {name.removeprefix(_FRONT): version for name, version in head.items() if name.startswith(_FRONT)}


def check(pool: str, theirs: Mapping[str, str], library: str | None = None) -> None:
    """Refuse a caller whose versions differ from those of the pool's nodes. Unknown versions are not checked.

    Args:
        pool: Name of the pool.
        theirs: Versions of the pool.
        library: Library whose model comes back to the caller; None if no model does.

    Raises:
        InvalidArgumentError: The minor version of Python, of shoal or of the library differs.
    """
    ours = mine()
    # If the pool uses this very environment, its new processes run the present code, also after an upgrade.
    if theirs.get("prefix") == ours["prefix"]:
        return
    for name in ("python", "shoal", *([library] if library else [])):
        if name in theirs and name in ours and theirs[name] != ours[name]:
            what = _TITLES[name]
            raise InvalidArgumentError(
                f'pool "{pool}" runs {what} {theirs[name]}, but this process runs {what} {ours[name]}: use an '
                f"environment with {what} {theirs[name]}, or start the pool again from this one (`shoal pool down "
                f"{pool}`, then `shoal pool up {pool}`)"
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
