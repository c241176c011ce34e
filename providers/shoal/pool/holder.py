"""Build the names of holders (the users, processes and runs that own operations, leases and jobs), and record to which
host a pool is bound.

A local pool is bound to the host on which it was started: only that host can start and end its nodes.
"""

from __future__ import annotations

import getpass
import os

from shoal.state.host import host_id, hostname
from shoal.state.schema import Pool

_JOB = "job:"

ANYWHERE = ""
"""Value of a pool's `host` column if any host can start and end the pool's nodes, as for an existing Ray cluster."""


def is_here(pool: Pool) -> bool:
    """Return whether this machine can start and end a pool's nodes.

    Rows written by shoal 0.1 have no host id. Such a pool belongs to the machine whose hostname is in the row.
    """
    if pool.host == ANYWHERE:
        return True
    return pool.host == hostname() if pool.host_id is None else pool.host_id == host_id()


def bind_here(pool: Pool) -> None:
    """Write to a pool's row that the pool is bound to this machine."""
    pool.host, pool.host_id = hostname(), host_id()


def is_bound_here(pool: Pool) -> bool:
    """Return whether a pool's row contains this machine's current hostname and host id. Return True, too, if the pool
    is bound to no host."""
    return pool.host == ANYWHERE or (pool.host, pool.host_id) == (hostname(), host_id())


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
