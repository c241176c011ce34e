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
    # `os._exit` ends the process at once. A normal exit could hang, because it waits for threads of Ray and MLflow. The
    # workers have ended already, so nothing is lost.
    os._exit(code)
