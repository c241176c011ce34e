"""Base classes of the options of pools: those of all pools, and those of pools on a cluster that shoal does not run.

DAG files import this module and the options of each backend, so they need neither the store nor an HTTP client.
"""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, Field

from shoal.errors import InvalidArgumentError
from shoal.option_validation import optional
from shoal.secrets.redaction import has_credentials, redact_address, redact_value

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_RULE = "1 to 40 of a-z, 0-9 and -, starting and ending with a letter or digit (URI hosts are lower-cased)"
"""Description of the valid names of pools, for error messages and help texts."""


def is_pool_name(text: str) -> bool:
    """Check whether a text is a valid pool name."""
    return _NAME.fullmatch(text) is not None


def items(value: str | None) -> list[str]:
    """Split the value of an option at its commas."""
    return [item.strip() for item in (value or "").split(",") if item.strip()]


def url_parts(url: str) -> SplitResult | None:
    """Split a URL into its parts. Return None if the text is not a URL."""
    try:
        parts = urlsplit(url)
        # `urlsplit` does not check the port. Only reading `parts.port` raises ValueError if the port is invalid.
        _ = parts.port
    except ValueError:
        return None
    return parts


def is_loopback(host: str) -> bool:
    """Return whether a hostname or IP address is a loopback address, such as localhost or 127.0.0.1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class PoolOptions(BaseModel):
    """Options of all pools. A subclass has the options of one backend."""

    backend_class: ClassVar[str]
    """Class of the backend as ``module:name``. Only processes that need the backend import it."""

    place: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that make up the URI of a pool before its options."""

    name: str = Field(description=f"Name of the pool: {NAME_RULE}.")
    backend: str = "local"
    min_nodes: int = Field(
        default=1, ge=1, description="Smallest number of nodes while the pool is up, including the head node."
    )
    max_nodes: int = Field(
        default=4, ge=1, le=1000, description="Largest number of nodes of the pool, including the head node."
    )
    cpus_per_node: int = Field(default=1, ge=1, le=1024, description="Number of CPUs that each node offers.")
    gpus_per_node: int = Field(
        default=0,
        ge=-1,
        le=64,
        description="Number of GPUs that each node offers. -1: all GPUs of this machine that no other node uses "
        "when the node starts; only for local:// pools.",
    )
    object_store_mb: int = Field(
        default=128, ge=80, description="Size in MB of each node's object store, the shared memory for Ray's objects."
    )
    # one day: a pool that is used every day stays up, but a forgotten pool goes down
    idle_timeout: float | None = Field(
        default=24 * 3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a job, lease or request after which the pool goes down. "
        "With `none`, an idle pool stays up.",
    )

    only_team: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="Team to which the pool belongs. Other teams, and processes without a team, can neither use nor "
        "change the pool. Default: the pool belongs to no team, and all may use it.",
    )

    def check_options(self) -> None:
        """Raise an error if options of this backend are missing or do not fit together.

        Raises:
            ValueError: The message says what to change.
        """


class ClusterOptions(PoolOptions):
    """Options of all pools whose nodes belong to a Ray cluster that shoal does not run."""

    ca_file: str | None = optional(
        "Path of a PEM file with the CA certificates to trust for an https:// `address` or `api`. A relative path is "
        "relative to $SHOAL_HOME. Default: the CA certificates of this machine. Allowed only for ray:// and kuberay:// "
        "pools."
    )
    token_over_http: Literal["allow"] | None = optional(
        "`allow`: send the token even to an http:// `address` or `api` on another host, although other users of the "
        "network can read it. Default: such a pool is refused. Allowed only for ray:// and kuberay:// pools."
    )
    shared_folders: str | None = optional(
        "Absolute paths of folders, separated by commas, that all nodes and all hosts that submit jobs mount at the "
        "same path. Jobs may name files there. Default: none, so data and results need URIs. Allowed only for ray:// "
        "and kuberay:// pools."
    )

    def shared(self) -> list[str]:
        """Return the folders in the option `shared_folders` as a list."""
        return items(self.shared_folders)

    def check_cluster(self, field: str, *, is_needed: bool, cure: str, wanted: str) -> None:
        """Raise an error if the URL of the cluster is wrong, or if options do not fit to it or to a cluster.

        Args:
            field: Name of the option with the URL.
            is_needed: Whether the URL has to be given.
            cure: What to do with credentials in the URL.
            wanted: What the URL has to be.
        """
        url = getattr(self, field) or ""
        if has_credentials(url):
            raise InvalidArgumentError(f"{field}={redact_value(url)}: the URL must not contain credentials; {cure}")
        parts = url_parts(url)
        is_url = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        if not is_url and (url or is_needed):
            raise ValueError(f"{field}={redact_address(url)!r}: {wanted}")
        if self.ca_file is not None and (parts is None or parts.scheme != "https"):
            raise ValueError(
                f"ca_file is allowed only with an https:// address, not with {field}={url!r}: remove "
                "ca_file, or use an https:// address"
            )
        if parts is not None and parts.query:
            raise ValueError(f'{field}={url!r}: the URL must end with the port or path; remove the part after "?"')

    def check_url_of_token(self, url: str | None) -> None:
        """Raise an error if the pool would send its token to a URL without encryption and to another host, unless
        `token_over_http` allows this.

        Raises:
            InvalidArgumentError: The token would be sent without encryption, so other users of the network could read
                the token and use it to run code.
        """
        parts = url_parts(url or "")
        if self.token_over_http == "allow" or parts is None or parts.scheme != "http":
            return
        if not is_loopback(parts.hostname or ""):
            raise InvalidArgumentError(
                f'pool "{self.name}" would send its token to {url} without encryption, so other users of the '
                "network could read the token: use an https:// address (with ca_file for a private certificate "
                "authority), or set token_over_http=allow if you trust the network"
            )
