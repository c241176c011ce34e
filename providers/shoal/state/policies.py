"""SQL for PostgreSQL by which the database itself keeps a team from changing the pools, leases and jobs of other teams.

Each team has a role, and row-level policies say which rows the role may write. The owner of the tables and the role of
the reconciler may write all rows.

A role may read nearly all rows of other teams: a process computes from them how many nodes a common pool needs, and a
sweep ends the nodes of a host that have no row. It cannot read their result files (table `files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shoal.errors import InvalidArgumentError, shown

_LONGEST = 50
"""Largest number of bytes in the name of a role. PostgreSQL cuts names after 63 bytes, and the names of the policies,
which contain that of the role, could become equal."""

_LEGAL = re.compile(r"[\w.@+ -]+")
"""Names of teams and roles that can be part of the SQL: letters, digits, and some other characters."""

_APPENDED = frozenset({"history"})
"""Tables whose rows a team may add, but not change."""

_SEQUENCES = ("usage_id_seq", "promotions_id_seq", "history_id_seq")

# The conditions under which a team may write a row, by table. {team} is the name of the team as SQL text.
_FREE_POOL = "NOT EXISTS (SELECT FROM pools p WHERE p.name = {table}.pool AND p.spec ->> 'only_team' <> {team})"
_OWN_JOB = "NOT EXISTS (SELECT FROM jobs j WHERE j.id = {job_id} AND j.team <> {team})"
_JOB_OF_FILE = "split_part(path, '/', CASE WHEN split_part(path, '/', 2) IN ('model', 'checkpoints') THEN 3 ELSE 2 END)"
_MAY_WRITE = {
    "pools": "coalesce(spec ->> 'only_team', {team}) = {team}",
    "demand": _FREE_POOL,
    "leases": _FREE_POOL,
    "operations": _FREE_POOL,
    "nodes": _FREE_POOL,
    "usage": _FREE_POOL,
    "jobs": f"(team = {{team}} OR (team IS NULL AND {_FREE_POOL}))",
    "job_metrics": _OWN_JOB.replace("{job_id}", "job_metrics.job_id"),
    "study_logs": _OWN_JOB.replace("{job_id}", "study_logs.job_id"),
    "promotions": _OWN_JOB.replace("{job_id}", "promotions.job_id"),
    "files": _OWN_JOB.replace("{job_id}", _JOB_OF_FILE),
    "locks": "true",
    "airflow_deployments": "true",
    "history": "true",
}
_MAY_ADD = {
    "leases": "(team IS NULL OR team = {team})",
    "jobs": _FREE_POOL,
}
"""Conditions on new rows, in addition to those in `_MAY_WRITE`."""

_EVERY_ROW = "USING (true) WITH CHECK (true)"


def policies(teams: Sequence[str], *, reconciler: str = "shoal_reconciler") -> str:
    """Return SQL that creates a role for each team, and the policies of these roles. The owner of the tables runs it,
    as often as needed.

    Args:
        teams: Names of the teams. A team's role is ``shoal_TEAM``.
        reconciler: Name of the role that may change the rows of all teams.

    Raises:
        InvalidArgumentError: A name is not legal, or a team's role would be that of the reconciler.
    """
    for role in (reconciler, *map(role_of, teams)):
        if not _LEGAL.fullmatch(role) or role == role_of("") or len(role.encode()) > _LONGEST:
            raise InvalidArgumentError(
                f"{shown(role)} cannot be the name of a role: use letters, digits, spaces and . @ + - _, and at most "
                f"{_LONGEST} bytes with the prefix {role_of('')}"
            )
    if reconciler in map(role_of, teams):
        raise InvalidArgumentError(
            f"{reconciler} would be the role of a team and of the reconciler: choose another role for the reconciler"
        )
    lines = [
        "-- Run this as the owner of shoal's tables, and again after each upgrade of shoal.",
        "-- It sets no passwords: set them with \\password in psql, or let pg_hba.conf identify the roles.",
        "BEGIN;",
        "SET LOCAL client_min_messages = warning;",
        *(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;" for table in _MAY_WRITE),
        *_role(reconciler),
        *(line for table in _MAY_WRITE for line in _policy(table, reconciler, "all", "ALL", _EVERY_ROW)),
    ]
    for team in teams:
        lines += [f"-- Team {team}", *_role(role_of(team))]
        lines += [line for table in _MAY_WRITE for line in _policies_of_team(table, team)]
    return "\n".join([*lines, "COMMIT;"])


def role_of(team: str) -> str:
    """Return the name of a team's role in the database."""
    return f"shoal_{team}"


def _role(role: str) -> Iterator[str]:
    """Yield statements that create a role, and let it use the tables. Policies restrict the rows."""
    yield f"DO $do$ BEGIN CREATE ROLE {_name(role)} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $do$;"
    yield f"GRANT USAGE ON SCHEMA public TO {_name(role)};"
    yield f"GRANT SELECT ON alembic_version TO {_name(role)};"
    yield f"GRANT USAGE ON SEQUENCE {', '.join(_SEQUENCES)} TO {_name(role)};"
    for table in _MAY_WRITE:
        rights = "SELECT, INSERT" if table in _APPENDED else "SELECT, INSERT, UPDATE, DELETE"
        yield f"GRANT {rights} ON {table} TO {_name(role)};"


def _policies_of_team(table: str, team: str) -> Iterator[str]:
    role = role_of(team)
    values = {"team": f"'{team}'", "table": table}
    may_write = _MAY_WRITE[table].format(**values)
    may_add = f"{may_write} AND {_MAY_ADD.get(table, 'true').format(**values)}"
    may_read = may_write if table == "files" else "true"
    yield from _policy(table, role, "read", "SELECT", f"USING ({may_read})")
    yield from _policy(table, role, "add", "INSERT", f"WITH CHECK ({may_add})")
    yield from _policy(table, role, "change", "UPDATE", f"USING ({may_write}) WITH CHECK ({may_write})")
    yield from _policy(table, role, "remove", "DELETE", f"USING ({may_write})")


def _policy(table: str, role: str, action: str, command: str, condition: str) -> Iterator[str]:
    name = _name(f"{action} {role}")
    yield f"DROP POLICY IF EXISTS {name} ON {table};"
    yield f"CREATE POLICY {name} ON {table} FOR {command} TO {_name(role)} {condition};"


def _name(name: str) -> str:
    return f'"{name}"'
