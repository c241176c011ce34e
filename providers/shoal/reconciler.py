"""The program of the background process that reconciles this host's pools and watches their jobs:
``python -m shoal.reconciler``. It joins `shoal.pool`, which does not know jobs, and `shoal.jobs`.
"""

from __future__ import annotations

import logging
import os

from shoal.jobs.reconcile.watch import LostJobs
from shoal.pool import reconciling

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")
    reconciling.run(watch=LostJobs().look)
