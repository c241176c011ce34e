"""Addresses of a pool's head node, the token for requests to the head's API, and the variables with which Ray connects
to the head.

For a pool on a Ray cluster, the store contains only the paths of the files with the token and the trusted certificates.
The reconciler and the drivers of jobs read the files.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from shoal.errors import InvalidArgumentError, NoTokenError
from shoal.pool.options import options_of
from shoal.pool.options.base import is_loopback
from shoal.pool.spec import PoolSpec
from shoal.state.home import home, store_tag, subfolder, write_file

NO_GCS = ""
"""Value of `Endpoint.gcs` (the address of Ray's control service) for a head that runs without Ray."""

REGISTER = "register"
"""Key in the endpoint of a node without Ray: the folder of the register of the pool's nodes."""

LIBRARIES = "libraries"
"""Key in the metadata of a submitted job: the names of the libraries that its driver imports, separated by spaces."""

_DRIVER = 'p=${SHOAL_PYTHON:-$0}; [ -x "$p" ] || p=python; exec "$p" -P -m shoal.jobs.driver "$@"'
"""Shell command that runs a job's driver on the head. The Python interpreter is `$SHOAL_PYTHON` if the variable is set
on the head, else the submitter's Python path. If this path does not exist on the head, the command runs `python`."""


def is_on_loopback(gcs: str) -> bool:
    """Return whether only nodes on the head's machine can connect to the head's Ray."""
    return is_loopback(gcs.rpartition(":")[0])


def driver_command(python: str, *arguments: str) -> list[str]:
    """Return the command that starts a job's driver on a head."""
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


class HeadAccess(Protocol):
    """Way to a head through another server, such as the API server of Kubernetes with its own credentials."""

    @property
    def url(self) -> str:
        """Return the URL at which this process reaches the head's HTTP API."""

    def headers(self, token: str) -> Mapping[str, str]:
        """Return the headers of a request that now starts, with the credentials of both servers."""

    def certificates(self) -> ssl.SSLContext:
        """Return the certificates for an https URL: those to trust, and that of this client if it has one."""


@dataclass(frozen=True)
class Endpoint:
    """Addresses and token of a pool's head.

    Attributes:
        api: URL of Ray's Job API.
        gcs: ``host:port`` to which drivers connect; `NO_GCS` if the head runs without Ray.
        token_path: File (mode 0600) with the bearer token; None if the head needs no token.
        versions: Versions of the software on the head, as far as they are known (see `shoal.pool.backends.versions`).
        ca_path: File with the CA certificates to trust for an https URL. None: the CA certificates of this machine.
        access: Way to the head, if this process does not send its requests to `api` itself.
        is_direct: Whether the head itself has sent an error, or its machine has refused a connection. Otherwise another
            server, such as a service of Kubernetes, does so while the head is paused.
    """

    api: str
    gcs: str
    token_path: Path | None
    versions: Mapping[str, str] = field(default_factory=dict)
    ca_path: Path | None = None
    access: HeadAccess | None = None
    is_direct: bool = True

    @property
    def is_on_loopback(self) -> bool:
        """Return whether the head is on this machine, at an address that no other machine can reach."""
        return is_loopback(urlsplit(self.api).hostname or "")

    def token(self) -> str:
        """Read the bearer token. Return an empty string if the head needs no token.

        Raises:
            NoTokenError: There is no token file.
        """
        if self.token_path is None:
            return ""
        try:
            return self.token_path.read_text().strip()
        except FileNotFoundError:
            raise NoTokenError(
                f"there is no token file {self.token_path}: the pool went down, or another user, or a process with "
                "another SHOAL_HOME, has started it. Only the user that started a local:// pool can use it: give each "
                "user a pool, or use a ray:// pool. If the pool is down, start it with `shoal pool up`"
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
        return {**ray_environment(self.token_path), "RAY_ADDRESS": self.gcs}


def ray_environment(token: Path) -> dict[str, str]:
    """Return the environment variables for the Ray processes of a local pool, and for drivers on pools with a token.

    Ray reads the variables when it is imported, so they have to be set before.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Without this setting, Ray replaces 127.0.0.1 in `ray.init("127.0.0.1:…")` by the host's own address. The
        # connection would then fail, because the head listens only on 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's metrics ports need no token, so any user could read the metrics. The next two settings turn these ports
        # off. Ray has no switch for the dashboard's metrics port, but an invalid number turns it off.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        # If the GCS (the head's control service) dies while a node starts, the node gives up after 30 s instead of 60
        # s. The shorter time helps the other nodes of this host, because they wait until this start has ended.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
        # The head declares a raylet (a node's main process) dead after 5 missed checks. With one check per second, a
        # killed raylet is declared dead after 5 s instead of 15 s.
        "RAY_health_check_period_ms": "1000",
        # Time limit for one check of a raylet. The nodes are on one machine, so a raylet that runs but does not answer
        # is paused, and is declared dead after 4 minutes instead of 55 s.
        "RAY_health_check_timeout_ms": "47000",
    }


def token_path(spec: PoolSpec) -> Path | None:
    """Return the path of the pool's token file; None if the pool's Ray cluster needs no token.

    A relative path is relative to ``$SHOAL_HOME``, so that hosts with different home folders can share a pool.
    """
    return home() / Path(spec.token_file).expanduser() if spec.token_file else None


def ca_path(spec: PoolSpec) -> Path | None:
    """Return the path of the pool's file with trusted certificates; None if the pool has no such file.

    A relative path is relative to ``$SHOAL_HOME``.
    """
    return home() / Path(spec.ca_file).expanduser() if spec.ca_file else None


def with_token(spec: PoolSpec, token: str) -> PoolSpec:
    """Write the token of a pool's cluster to a file, and return the spec with the path of this file.

    Raises:
        StoreError: The file cannot be written.
    """
    return PoolSpec.parse({**spec.model_dump(), "token_file": keep_token(spec.name, token)})


def check_token(spec: PoolSpec, owner: str, field: str) -> None:
    """Check that a pool may have a token that is not in a file.

    Args:
        spec: Spec of the pool.
        owner: Object that contains the token, for the message.
        field: Name of the token in this object, for the message.

    Raises:
        InvalidArgumentError: The pool is no ray:// pool, or already has a token file.
    """
    if "token_file" not in options_of(spec.backend).model_fields:
        raise InvalidArgumentError(
            f"{owner} has a {field}, which is allowed only for ray:// pools, as the token of the Ray cluster: remove "
            f"the {field}, because a {spec.backend}:// pool creates its own tokens"
        )
    if spec.token_file is not None:
        raise InvalidArgumentError(
            f"{owner} has a {field} and the option token_file: use only one of them as the token"
        )


def keep_token(pool: str, token: str) -> str:
    """Write the token of a pool's cluster to a file (mode 0600) in ``$SHOAL_HOME``.

    If the file contains another token, the file is replaced. So after a change of the token, call this function again.

    Raises:
        StoreError: The file cannot be written.
    """
    path = subfolder(_folder()) / pool
    if not (path.is_file() and path.read_text() == token):
        write_file(path, token)
    return f"{_folder()}/{pool}"


def kept_token(pool: str) -> str:
    """Return the token in the file that `keep_token` has written; empty if there is no such file."""
    try:
        return (home() / _folder() / pool).read_text().strip()
    except FileNotFoundError:
        return ""


def remove_token(pool: str) -> None:
    """Remove the file that `keep_token` has written, if there is one."""
    (home() / _folder() / pool).unlink(missing_ok=True)


def _folder() -> str:
    """Return the name of the folder for token files in ``$SHOAL_HOME``. Each store has its own folder."""
    return f"tokens{store_tag()}"
