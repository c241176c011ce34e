"""Options of pools on existing Ray clusters."""

from __future__ import annotations

from typing import ClassVar

from shoal.option_validation import optional
from shoal.pool.options.base import ClusterOptions


class RayOptions(ClusterOptions):
    """Options of a ray:// pool."""

    backend_class: ClassVar[str] = "shoal.pool.backends.ray.backend:RayBackend"

    address: str | None = optional(
        "URL of the Job API of the existing Ray cluster, such as http://host:8265. Required for ray:// pools, and "
        "allowed only for them."
    )
    gcs: str | None = optional(
        "Address (host:port) of the Ray cluster to which Ray drivers connect. Default: port 6379 of the host in "
        "`address`. Allowed only for ray:// pools."
    )
    token_file: str | None = optional(
        "Path of a file (mode 0600) that contains the bearer token of the Ray cluster. A relative path is relative to "
        "$SHOAL_HOME. Default: the cluster needs no token. Allowed only for ray:// pools."
    )

    def check_options(self) -> None:
        """Raise an error if the URL of the cluster is missing or wrong."""
        self.check_cluster(
            "address",
            is_needed=True,
            cure="put the token in a file and give token_file=",
            wanted=f"a ray:// pool needs the URL of the cluster's Job API, for example ray://{self.name}"
            "?address=http://10.0.0.5:8265",
        )
