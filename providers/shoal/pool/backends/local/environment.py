"""Environment variables of the processes of a local pool: those that they inherit, and those that configure Ray."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.pool.backends.local.gpus import SELECTORS
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state.home import home
from shoal.state.temp_folder import temp_folder

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SHOAL_STATE_URL", "UV_CONFIG_FILE", *SELECTORS,
)  # fmt: skip
"""The only environment variables that a node inherits from the process that starts it, so that the secrets of an
Airflow or Prefect task do not get into the pool."""


def inherited_environment() -> dict[str, str]:
    """Return the environment of a detached process: those variables of this process that are in `_INHERITED`, and
    SHOAL_HOME."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if NODE_TAG in os.environ:
        # This process belongs to a node, so its own TMPDIR is the node's folder, which is removed when the node ends.
        # The detached process may run longer, so it gets the host's temp folder instead.
        kept["TMPDIR"] = str(temp_folder())
    return {**kept, "SHOAL_HOME": str(home()), "PYTHONUNBUFFERED": "1"}


def ray_environment(token: Path) -> dict[str, str]:
    """Return the environment variables for every Ray process and every driver of a local pool.

    Ray reads the variables when it is imported, so they have to be set before.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Without this setting, Ray replaces 127.0.0.1 in `ray.init("127.0.0.1:…")` by the host's own address. The
        # connection would fail, because the head listens only on 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Anybody could read Ray's metrics, because the metrics ports need no token. So the next two settings turn these
        # ports off. For the dashboard's port there is no such setting, but an invalid number turns the port off.
        "RAY_enable_metrics_collection": "0",
        "DASHBOARD_METRIC_PORT": "-1",
        # If the GCS (the head's control service) dies while a node starts, the node gives up after 30 s instead of
        # 60 s. A shorter time matters because other nodes of this host wait until the start has ended.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
        # The head declares a raylet (a node's main process) dead after 5 missed checks. With one check per second, a
        # killed raylet is declared dead after 5 s instead of 15 s.
        "RAY_health_check_period_ms": "1000",
        # If a raylet (a node's main process) does not answer a check, the check ends after this time. So an unreachable
        # raylet is declared dead after 20 s instead of 55 s.
        "RAY_health_check_timeout_ms": "3000",
    }
