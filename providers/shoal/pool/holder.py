"""Who uses a pool: the names of holders (the owners of operations, leases and jobs) that are users, processes, jobs or
DAG runs, and the rule that protects the pools, leases and jobs of a team from other teams.

`shoal.airflow.deployment` finds the DAG run of a task, and `shoal.prefect.current_run` builds the names of holders
that are flow runs.

Every request of a user to change something of a team calls `require_team`. What shoal does by itself is not checked:
reconciling, sweeps, and the end of jobs and leases of runs that have ended. A process may name any team, so the rule is
a guard rail against mistakes: a team that has to be separated has a store of its own.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from shoal.errors import TeamError

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


def definer_of(holder: str) -> str:
    """Return who defines a pool if a holder brings it up: the DAG without the run, the user without the process, and
    otherwise the holder without what follows a slash. All flow runs of Prefect are one definer, because their holders
    do not name the flow."""
    if (run := DagRunHolder.of(holder)) is not None:
        return f"{run.deployment}:{run.dag_id}"
    if holder.startswith(_PREFECT):
        return _PREFECT
    return holder.removeprefix("python:").removeprefix("cli:").partition("/")[0]


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


TEAM_VARIABLE = "SHOAL_TEAM"
"""Environment variable with the team for which a process acts."""

ALL_TEAMS = "*"
"""Name with which an administrator acts for all teams."""

_team: ContextVar[str | None] = ContextVar("shoal_team", default=None)


@contextmanager
def acting_for(team: str | None) -> Iterator[None]:
    """Act for a team inside the ``with`` block, in this thread or asyncio task. With None, the block changes
    nothing."""
    token = _team.set(team or _team.get())
    try:
        yield
    finally:
        _team.reset(token)


def asking_team(team: str | None = None) -> str | None:
    """Return the team for which this process acts: `team` if it is given, else that of `acting_for`, else
    ``$SHOAL_TEAM``. None: no team."""
    from shoal.state.databases import storable  # here, because DAG files import this module, but need no store

    return storable(team or _team.get() or os.environ.get(TEAM_VARIABLE) or "") or None


def stored_team(team: str | None) -> str | None:
    """Return the team to store for a new lease or job of a process that acts for `team`. An administrator's leases and
    jobs belong to no team."""
    return None if team == ALL_TEAMS else team


def may_change(owner: str | None, team: str | None, *, is_reserved: bool = False) -> bool:
    """Return whether a process may change a pool, lease or job.

    Args:
        owner: Team to which the object belongs; None if it belongs to no team.
        team: Team for which the process acts.
        is_reserved: Whether the object was given to the team on purpose, as a pool with `only_team`. Then a process
            without a team may not change it, either. Leases and jobs get the team of the process that makes them, in
            Airflow even if nobody has set up teams, and without a team they can be ended as before.
    """
    return owner is None or team in (owner, ALL_TEAMS) or (team is None and not is_reserved)


def require_team(owner: str | None, team: str | None, what: str, *, is_reserved: bool = False) -> None:
    """Raise an error if a process may not change a pool, lease or job (see `may_change`).

    Args:
        owner: Team to which the object belongs; None if it belongs to no team.
        team: Team for which the process acts.
        what: The object, for the message, such as ``pool "retrain"``.
        is_reserved: As for `may_change`.

    Raises:
        TeamError: The object belongs to another team.
    """
    if may_change(owner, team, is_reserved=is_reserved):
        return
    acts = "no team" if team is None else f'team "{team}"'
    raise TeamError(
        f'{what} belongs to team "{owner}", and this process acts for {acts}: nothing was changed. Ask team "{owner}" '
        f"to do it. If you belong to this team, set {TEAM_VARIABLE}={owner}; an administrator sets "
        f"{TEAM_VARIABLE}='{ALL_TEAMS}'"
    )


class Notice(str):
    """Sentence about a change to a pool or a job, and the pool and the holder that the change concerns.

    Args:
        text: The sentence.
        holder: The holder. None: the change concerns all holders on the pool, such as the end of a node.
        pool: Name of the pool. None: the change concerns no pool, such as the end of a process that was left over.
    """

    holder: str | None
    pool: str | None

    def __new__(cls, text: str, holder: str | None = None, pool: str | None = None) -> Notice:
        """Create the sentence."""
        made = super().__new__(cls, text)
        made.holder, made.pool = holder, pool
        return made

    @classmethod
    def of(cls, sentence: str) -> Notice:
        """Return a sentence as a notice. A plain sentence concerns no holder and no pool."""
        return sentence if isinstance(sentence, cls) else cls(sentence)
