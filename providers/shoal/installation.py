"""How this package was installed: the name of its distribution and the addresses of the project. Both stand in
`pyproject.toml` alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution


@functools.cache
def distribution() -> Distribution | None:
    """Return the distribution that has installed this package; None if the package was only put on the path."""
    from importlib.metadata import entry_points  # imports the packages of e-mail: only those wait who ask

    found = entry_points(group="apache_airflow_provider")
    return next((each.dist for each in found if each.value == "shoal.airflow:get_provider_info"), None)


def name() -> str:
    """Return the name of the distribution, with which it is installed from an index."""
    found = distribution()
    return str(found.metadata["Name"]) if found else "shoal"


def address(label: str) -> str | None:
    """Return one of the project's addresses, such as ``Documentation``; None if the project has no such address."""
    found = distribution()
    given = (found.metadata.get_all("Project-URL") or []) if found else []
    addresses = dict(line.split(", ", 1) for line in given)
    return addresses[label].rstrip("/") if label in addresses else None


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "{name()}[{extra}]"'


def others() -> list[str]:
    """Return the names of other distributions that have installed files into this package."""
    from importlib.metadata import packages_distributions

    return sorted({each for each in packages_distributions().get("shoal", []) if each != name()})
