"""Addresses of a pool's head node, and the token for requests to the head's API."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import InvalidArgumentError, PoolDownError
from shoal.pool.spec import is_loopback

NO_GCS = ""
"""Value of `Endpoint.gcs` (the address of Ray's control service) for a head that runs without Ray."""

_DRIVER = 'p=${SHOAL_PYTHON:-$0}; [ -x "$p" ] || p=python; exec "$p" -P -m shoal.jobs.driver "$@"'
"""Shell command that runs a job's driver on the head. The Python interpreter is `$SHOAL_PYTHON` if the variable is set
on the head, else the submitter's Python path. If this path does not exist on the head, the command runs `python`."""


def driver_command(python: str, *arguments: str) -> list[str]:
    """Return the command that starts a job's driver on a head.

    Args:
        python: Path of Python in the environment of the submitter.
        arguments: Command line arguments of the driver.
    """
    return ["sh", "-c", _DRIVER, python, *arguments]


def driver_arguments(command: Sequence[str]) -> list[str] | None:
    """Extract the driver's command line arguments from a command that :func:`driver_command` has built.

    Returns:
        The arguments. None for a command that `driver_command` has not built, or that runs the driver in another Python
        environment than that of this process.
    """
    if list(command[:3]) != ["sh", "-c", _DRIVER]:
        return None
    python = os.environ.get("SHOAL_PYTHON") or command[3]
    return list(command[4:]) if os.path.dirname(python) == os.path.dirname(sys.executable) else None


@dataclass(frozen=True)
class Endpoint:
    """Addresses and token of a pool's head.

    Attributes:
        api: URL of Ray's Job API.
        gcs: ``host:port`` to which drivers connect; `NO_GCS` if the head runs without Ray.
        token_path: File (mode 0600) with the bearer token; None if the head needs no token.
        versions: Versions of the software on the head, as far as they are known (see `shoal.pool.backends.versions`).
        ca_path: File with the CA certificates to trust for an https URL. None: the CA certificates of this machine.
        ray_environment: Environment variables that Ray needs in a driver of this pool, in addition to the address.
    """

    api: str
    gcs: str
    token_path: Path | None
    versions: Mapping[str, str] = field(default_factory=dict)
    ca_path: Path | None = None
    ray_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_on_loopback(self) -> bool:
        """Return whether the head is on this machine, at an address that no other machine can reach."""
        return is_loopback(urlsplit(self.api).hostname or "")

    def token(self) -> str:
        """Read the bearer token. Return an empty string if the head needs no token.

        Raises:
            PoolDownError: The token file is gone because the pool went down.
        """
        if self.token_path is None:
            return ""
        try:
            return self.token_path.read_text().strip()
        except FileNotFoundError:
            raise PoolDownError(
                f"the token file {self.token_path} was deleted when the pool went down: start the pool with "
                "`shoal pool up`"
            ) from None

    def driver_environment(self) -> Mapping[str, str]:
        """Return the environment variables with which a Ray driver on the pool's host connects to the pool.

        Set these variables before Ray is imported.

        Raises:
            InvalidArgumentError: The pool runs without Ray.
            RuntimeError: This process has already imported Ray, which would ignore the variables.
        """
        if self.gcs == NO_GCS:
            raise InvalidArgumentError(
                "this pool runs without Ray (ray=false), so no Ray driver can connect to it: use a pool with Ray"
            )
        if "ray" in sys.modules:
            raise RuntimeError(
                "Ray is already imported, so it ignores the pool's environment variables: set them before the import, "
                "or use a new process"
            )
        if self.token_path is None:
            return {"RAY_ADDRESS": self.gcs, "RAY_AUTH_MODE": "disabled"}
        return {**self.ray_environment, "RAY_ADDRESS": self.gcs}
