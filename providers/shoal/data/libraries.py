"""Check that the libraries for reading rows are installed, and raise an error that names the extra to install.

The libraries may be missing on a host that only runs Airflow.
"""

from __future__ import annotations

from importlib.util import find_spec

from shoal.errors import MissingExtraError


def need(*packages: str) -> None:
    """Check that libraries are installed, before code that reads or writes rows imports them.

    Raises:
        MissingExtraError: If one of the libraries is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, "data")
