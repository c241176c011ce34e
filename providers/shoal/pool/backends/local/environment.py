"""Build the environment variables for the processes of a local pool: settings for Ray, and variables inherited from the
parent process."""

from __future__ import annotations

import os
from pathlib import Path

from shoal import telemetry
from shoal.pool.backends.local.gpus import SELECTORS
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state.home import home
from shoal.state.temp_folder import temp_folder

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SHOAL_STATE_URL", "UV_CONFIG_FILE", *SELECTORS,
)  # fmt: skip
"""The only environment variables that a node inherits from the process that starts the node. So the secrets of an
Airflow or Prefect task do not reach the pool."""


def inherited_environment() -> dict[str, str]:
    """Return the environment variables for a detached process: the variables of this process that are in `_INHERITED`,
    the settings of OpenTelemetry without credentials, and SHOAL_HOME."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if NODE_TAG in os.environ:
        # This process belongs to a node, so its TMPDIR is the node's folder, which is removed when the node ends. The
        # detached process may run longer than the node, so its TMPDIR is the host's temp folder.
        kept["TMPDIR"] = str(temp_folder())
    return {**kept, **telemetry.settings(), "SHOAL_HOME": str(home()), "PYTHONUNBUFFERED": "1"}


def ray_environment(token: Path) -> dict[str, str]:
    """Return the environment variables for every Ray process and every driver of a local pool.

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
        # Time limit for one check of a raylet (a node's main process). With this limit, an unreachable raylet is
        # declared dead after 20 s instead of 55 s.
        "RAY_health_check_timeout_ms": "3000",
    }
