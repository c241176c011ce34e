"""Build the environment variables that the processes of a local pool inherit from the process that starts them."""

from __future__ import annotations

import os

from shoal import telemetry
from shoal.os_processes import import_folders
from shoal.pool.backends.local import bytecode
from shoal.pool.backends.local.gpus import SELECTORS
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state.home import home, subfolder
from shoal.state.private_folders import temp_folder

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SHOAL_STATE_URL", "UV_CONFIG_FILE", *SELECTORS,
)  # fmt: skip
"""The only environment variables that a node inherits from the process that starts the node. So the secrets of an
Airflow or Prefect task do not reach the pool. PYTHONDONTWRITEBYTECODE is not inherited, because each start of a node
would compile all packages that are not compiled yet."""


def inherited_environment() -> dict[str, str]:
    """Return the environment variables for a detached process: the variables of this process that are in `_INHERITED`,
    the settings of OpenTelemetry without credentials, and SHOAL_HOME."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if "PYTHONPATH" in kept:
        kept["PYTHONPATH"] = os.pathsep.join(import_folders(kept["PYTHONPATH"]))
    if NODE_TAG in os.environ:
        # This process belongs to a node, so its TMPDIR is the node's folder, which is removed when the node ends. The
        # detached process may run longer than the node, so its TMPDIR is the host's temp folder.
        kept["TMPDIR"] = str(temp_folder())
    if "PYTHONPYCACHEPREFIX" not in kept and not all(map(bytecode.can_be_written, bytecode.sources_without_bytecode())):
        kept["PYTHONPYCACHEPREFIX"] = str(subfolder("bytecode"))
    return {**kept, **telemetry.settings(), "SHOAL_HOME": str(home()), "PYTHONUNBUFFERED": "1"}
