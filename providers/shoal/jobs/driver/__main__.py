"""Run one attempt of a job: ``python -m shoal.jobs.driver JOB_ID ATTEMPT``."""

from __future__ import annotations

import logging
import os
import sys

from shoal.jobs.driver.main import main

if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of Ray and MLflow may hang at interpreter exit; the workers have ended already
