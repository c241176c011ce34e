"""Build the names of holders (the owners of operations, leases and jobs). This module covers holders
that are users, processes or jobs.

`shoal.airflow._run_holder` and `shoal.prefect._run_holder` build the names of holders that are DAG runs or flow runs.
"""

from __future__ import annotations

import getpass
import os

from shoal.state.process import hostname

_JOB = "job:"


def python_holder() -> str:
    """Return the holder name of a plain Python process: ``python:<user>@<host>/<pid>``."""
    return f"python:{_user()}@{hostname()}/{os.getpid()}"


def cli_holder() -> str:
    """Return the holder name of a user at a terminal: ``cli:<user>@<host>``."""
    return f"cli:{_user()}@{hostname()}"


def job_holder(job_id: str) -> str:
    """Return the holder name of a job's own lease: ``job:<job_id>``. Such a lease lasts as long as the job."""
    return _JOB + job_id


def job_of(holder: str) -> str | None:
    """Return the id of the job that a holder's name contains; None if the holder is not a job."""
    return holder.removeprefix(_JOB) if holder.startswith(_JOB) else None


def _user() -> str:
    """Return the user's name, or the uid as text if the uid has no name, as in some containers."""
    try:
        return getpass.getuser()
    # For a uid without a name, Python 3.13 and later raise OSError, and older releases raise KeyError.
    except (KeyError, OSError):
        return str(os.getuid())
