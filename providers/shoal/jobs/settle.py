"""Record the end of lost jobs, and start jobs that wait for room: ``python -m shoal.jobs.settle``.

The reconciler starts this program when a job's row in the store has not changed for some time. The reconciler itself
sends no requests to the heads of pools. The program ends when no job waits for room.
"""

from __future__ import annotations

import logging

from shoal.jobs.cleanup import settle_jobs, start_waiting_jobs

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for sentence in settle_jobs():
        logging.getLogger("shoal.settle").info(sentence)
    start_waiting_jobs()
