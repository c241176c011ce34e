"""Start the reconciler, the background process of this host's pools (``python -m shoal.pool.reconciler``).

The reconciler's work is in `shoal.pool.reconcile.background_process`.
"""

from __future__ import annotations

import logging
import os
import sys

from shoal.pool.backends.local.environment import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
from shoal.pool.reconcile import background_process
from shoal.state.locks import open_locked


def ensure_running() -> None:
    """Start the reconciler of this ``SHOAL_HOME`` and store, unless it is already running."""
    with open_locked(background_process.lock_path(), wait=False) as free:
        if not free:
            return
    spawn_detached(
        [sys.executable, "-m", "shoal.pool.reconciler"],
        env=inherited_environment(),
        log=background_process.log_path(),
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")
    background_process.run()
