"""Record the end of lost jobs, once: ``python -m shoal.jobs.settle``.

The reconciler starts this program when a job sends no more heartbeats, because the reconciler itself does not talk to
the heads of pools.
"""

from __future__ import annotations

import logging

from shoal.jobs.cleanup import settle_jobs

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for sentence in settle_jobs():
        logging.getLogger("shoal.settle").info(sentence)
