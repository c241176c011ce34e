"""Build the names of holders (the owners of operations, leases and jobs). This module covers holders that are users,
processes, jobs or DAG runs.

`shoal.airflow.deployment` finds the DAG run of a task, and `shoal.prefect.current_run` builds the names of holders
that are flow runs.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass

_JOB = "job:"
_AIRFLOW = "airflow:"
_PREFECT = "prefect:"

Ancestors = Mapping[str, bool]
"""Holders whose end is also the end of a job or lease: the blocks of `pool_lease` around it, its flow run, and the runs
that have called this run. The value is True for the same process, and False for a caller that has started a deployment:
only the cancellation of such a caller ends the job or lease."""


def ends_with(holder: str, ancestors: Ancestors | None, ended: str, *, is_cancelled: bool = False) -> bool:
    """Return whether a job or lease has to end, because the holder `ended` has ended.

    Args:
        holder: Holder of the job or lease.
        ancestors: Ancestors of the job or lease.
        ended: Holder that has ended.
        is_cancelled: Whether `ended` was cancelled.
    """
    is_in_process = (ancestors or {}).get(ended)
    return ended == holder or (is_in_process is not None and (is_in_process or is_cancelled))


def run_of(holder: str) -> str:
    """Return the holder that is the whole flow run, if a holder is a block of it: ``prefect:<flow_run_id>/<block>``.
    Other holders are returned unchanged."""
    return holder.partition("/")[0] if holder.startswith(_PREFECT) else holder


def whole_run(holder: str) -> str:
    """Return the holder that is the whole DAG run or flow run, if a holder is a block of it."""
    run = DagRunHolder.of(holder)
    return run.name if run else run_of(holder)


def runs_around(holder: str, ancestors: Ancestors | None) -> frozenset[str]:
    """Return the run of a holder, and the runs in the same process that have called it."""
    callers = [ancestor for ancestor, is_in_process in (ancestors or {}).items() if is_in_process]
    return frozenset(run_of(each) for each in (holder, *callers))


def python_holder() -> str:
    """Return the holder name of a plain Python process: ``python:<user>@<host>/<pid>``."""
    return f"python:{_user_and_host()}/{os.getpid()}"


def cli_holder() -> str:
    """Return the holder name of a user at a terminal: ``cli:<user>@<host>``."""
    return f"cli:{_user_and_host()}"


def job_holder(job_id: str) -> str:
    """Return the holder name of a job's own lease: ``job:<job_id>``. Such a lease lasts as long as the job."""
    return _JOB + job_id


def job_of(holder: str) -> str | None:
    """Return the id of the job that a holder's name contains; None if the holder is not a job."""
    return holder.removeprefix(_JOB) if holder.startswith(_JOB) else None


@dataclass(frozen=True)
class DagRunHolder:
    """A DAG run of Airflow as a holder.

    Attributes:
        deployment: Id of the Airflow deployment. None: shoal chose the name before names contained the deployment.
        dag_id: Id of the DAG.
        run_id: Id of the DAG run.
    """

    deployment: str | None
    dag_id: str
    run_id: str

    @classmethod
    def of(cls, holder: str) -> DagRunHolder | None:
        """Return the DAG run that a holder's name contains; None if the holder is no DAG run.

        The id of a lease at the end of the name (``#<lease>``) is left out.
        """
        # An id of a DAG contains none of ":", "/" and "#". A run's id may contain ":" and "/", but no "#", because
        # Airflow's default pattern for run ids does not allow this character.
        first, slash, run = holder.removeprefix(_AIRFLOW).partition("#")[0].partition("/")
        deployment, colon, dag = first.partition(":")
        if not holder.startswith(_AIRFLOW) or not slash:
            return None
        return cls(deployment, dag, run) if colon else cls(None, first, run)

    @property
    def name(self) -> str:
        """Return the name of the holder: ``airflow:<deployment>:<dag_id>/<run_id>``."""
        deployment = "" if self.deployment is None else f"{self.deployment}:"
        return f"{_AIRFLOW}{deployment}{self.dag_id}/{self.run_id}"


def _user_and_host() -> str:
    """Return ``<user>@<host>``, with the uid if it has no name, as in some containers."""
    # DAG files import this module, and must not import the store.
    from shoal.os_processes import hostname

    try:
        user = getpass.getuser()
    # For a uid without a name, Python 3.13 and later raise OSError, and older releases raise KeyError.
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{hostname()}"
