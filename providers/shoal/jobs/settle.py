"""Sets the rows of lost jobs right, once: ``python -m shoal.jobs.settle``.

The reconciler starts it when a job gives no sign of life: asking the pool's head is no task of the reconciler itself.
"""

from __future__ import annotations

import logging

from shoal.jobs.cleanup import settle_jobs

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for sentence in settle_jobs():
        logging.getLogger("shoal.settle").info(sentence)
