"""Run one attempt of a job: ``python -m shoal.jobs.driver JOB_ID ATTEMPT``."""

from __future__ import annotations

from shoal.jobs.driver.main import run_and_exit

if __name__ == "__main__":
    run_and_exit()
