"""Addresses of a pool's head, and the token that its API needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import PoolDownError
from shoal.pool.backends.local.environment import ray_environment


@dataclass(frozen=True)
class Endpoint:
    """Addresses and token of a pool's head.

    Attributes:
        api: URL of Ray's Job API.
        gcs: ``host:port`` to which drivers connect.
        token_path: File (mode 0600) with the bearer token; None if the head needs no token.
        versions: Versions of the software on the head, as far as they are known (see `shoal.pool.backends.versions`).
    """

    api: str
    gcs: str
    token_path: Path | None
    versions: Mapping[str, str] = field(default_factory=dict)

    def token(self) -> str:
        """Read the bearer token. Return an empty string if the head needs none.

        Raises:
            PoolDownError: The token file is gone because the pool went down.
        """
        if self.token_path is None:
            return ""
        try:
            return self.token_path.read_text().strip()
        except FileNotFoundError:
            raise PoolDownError(f"the token file {self.token_path} was deleted when the pool went down") from None

    def driver_environment(self) -> Mapping[str, str]:
        """Return the environment variables with which a Ray driver on the pool's host connects to the pool.

        Set these variables before Ray is imported.

        Raises:
            RuntimeError: This process has already imported Ray, which would ignore the variables.
        """
        if "ray" in sys.modules:
            raise RuntimeError(
                "Ray is already imported, so it ignores the pool's environment variables: set them before the import, "
                "or use a new process"
            )
        if self.token_path is None:
            return {"RAY_ADDRESS": self.gcs, "RAY_AUTH_MODE": "disabled"}
        return {**ray_environment(self.token_path), "RAY_ADDRESS": self.gcs}
