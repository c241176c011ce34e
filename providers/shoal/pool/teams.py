"""The rule that protects the pools, leases and jobs of a team from other teams.

Every request of a user to change them calls `require`. What shoal does by itself is not checked: reconciling, sweeps,
and the end of jobs and leases of runs that have ended. A process may name any team, so the rule is a guard rail against
mistakes: a team that has to be separated has a store of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shoal.errors import TeamError

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


def asking(team: str | None = None) -> str | None:
    """Return the team for which this process acts: `team` if it is given, else that of `acting_for`, else
    ``$SHOAL_TEAM``. None: no team."""
    from shoal.state.databases import storable  # here, because DAG files import this module, but need no store

    return storable(team or _team.get() or os.environ.get(TEAM_VARIABLE) or "") or None


def stored(team: str | None) -> str | None:
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


def require(owner: str | None, team: str | None, what: str, *, is_reserved: bool = False) -> None:
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
