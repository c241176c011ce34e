"""Run one attempt of a job: ``python -m shoal.jobs.driver JOB_ID ATTEMPT [LIBRARY]``."""

from __future__ import annotations

import os

from shoal.jobs.driver.main import run

if __name__ == "__main__":
    os._exit(run())
