"""Where a pool is reached, and what Ray's processes there have to have in their environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import PoolDownError


@dataclass(frozen=True)
class Endpoint:
    """Where a pool's head is reached.

    Attributes:
        api: URL of Ray's Job API.
        gcs: ``host:port`` that drivers connect to.
        token_path: 0600 file with the bearer token; None where the head asks for none.
    """

    api: str
    gcs: str
    token_path: Path | None

    def token(self) -> str:
        """The bearer token; empty where the head asks for none.

        Raises:
            PoolDownError: The pool went down meanwhile.
        """
        if self.token_path is None:
            return ""
        try:
            return self.token_path.read_text().strip()
        except FileNotFoundError:
            raise PoolDownError(f"{self.token_path} is gone: the pool went down") from None

    def driver_environment(self) -> Mapping[str, str]:
        """Environment in which a Ray driver on the pool's host connects to it; set before Ray is imported.

        Raises:
            RuntimeError: Ray is imported already in this process, and would not read it any more.
        """
        if "ray" in sys.modules:
            raise RuntimeError("Ray is imported already: set the pool's environment first, or use a fresh process")
        if self.token_path is None:
            return {"RAY_ADDRESS": self.gcs, "RAY_AUTH_MODE": "disabled"}
        return {**ray_environment(self.token_path), "RAY_ADDRESS": self.gcs}


def ray_environment(token: Path) -> dict[str, str]:
    """What every Ray process of a local pool, and every driver that connects to one, needs in its environment.

    Read by Ray when it is imported, so it has to be there before.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Without it `ray.init("127.0.0.1:…")` is rewritten to the host's address, where nothing listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's metrics ports ask for no token. The nodes' are turned off; the dashboard's has no switch, and is missing
        # where its number is no port.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        # A node whose GCS died while it came up gives up, and its turn to start, after this time instead of 60 s.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
        # A killed raylet is declared dead after 5 missed checks: 5 s instead of 15.
        "RAY_health_check_period_ms": "1000",
        # One that cannot be reached (each check then lasts this long): 20 s instead of 55.
        "RAY_health_check_timeout_ms": "3000",
    }
