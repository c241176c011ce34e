"""This Airflow as shoal knows it: settings in its section ``[shoal]``, its id, and the names of its runs as holders.

An option of the section sets its environment variable unless the variable is set already. shoal itself, with its
command line and the processes of pools, reads only the variables and not Airflow's configuration.

Names of holders contain the id of the deployment, so that two Airflows with one store do not take each other's DAG runs
for their own. The id is the option `deployment`, else the Airflow Variable ``shoal_deployment``. The listener makes
this Variable when the scheduler starts.
"""

from __future__ import annotations

import logging
import os
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from shoal.errors import InvalidArgumentError, shown
from shoal.pool.holder import ALL_TEAMS, DagRunHolder

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


SECTION = "shoal"

_OPTIONS = {
    "home": (
        "Folder with the state of pools, with jobs and their logs. Default: ~/.shoal. All workers of a host must use "
        "the same folder.",
        "/var/lib/shoal",
    ),
    "state_url": (
        "SQLAlchemy URL of the PostgreSQL database with the state of pools and jobs. Default: a SQLite file in `home`. "
        "Required with workers on several hosts. As for other secrets, `state_url_cmd` and `state_url_secret` name a "
        "command or a secret with the value. In an Airflow with several teams, section `[TEAM=shoal]` names the store "
        "of a team.",
        "postgresql+psycopg://shoal@db.example/shoal",
    ),
    "pool": (
        "Name of the pool that a task uses if neither its arguments nor its spec name one, and there is no connection "
        "`compute_pool_default`. Default: the only pool that is up.",
        "retrain",
    ),
    "pool_uris": (
        "`refuse`: only connections of type `compute_pool` define pools, and a URI in a DAG is refused. Default: DAGs "
        "may define pools by URIs.",
        "refuse",
    ),
    "ui_url": (
        "Address of the page for pools, jobs and models, to which tasks link. Default: the page in Airflow, if the "
        "extra `ui` is installed where the task runs.",
        "https://shoal.example",
    ),
    "deployment": (
        "Id of this Airflow in the names of its leases and jobs, which differs from the ids of other Airflows that use "
        "the same store. Letters, digits, `.`, `_` and `-`. Default: the Variable `shoal_deployment`, which the "
        "scheduler makes.",
        "production",
    ),
}

VARIABLES = {name: f"SHOAL_{name.upper()}" for name in _OPTIONS if name != "deployment"}
"""Environment variable of each option that shoal also reads outside of Airflow."""


def config_section() -> dict[str, Any]:
    """Return the description of the section ``[shoal]`` in the format that Airflow expects of a provider."""
    return {
        SECTION: {
            "description": "Settings of shoal. An option with an environment variable sets it for all processes of "
            "Airflow, unless the variable is set already.",
            "options": {
                name: {
                    "description": f"{text} Environment variable: {VARIABLES[name]}." if name in VARIABLES else text,
                    "version_added": "0.1.0",
                    "type": "string",
                    "example": example,
                    "default": None,
                    "sensitive": name == "state_url",
                }
                for name, (text, example) in _OPTIONS.items()
            },
        }
    }


def has_teams() -> bool:
    """Return whether Airflow has several teams (``[core] multi_team``)."""
    from airflow.sdk.configuration import conf

    return bool(conf.getboolean("core", "multi_team", fallback=False))


def store_of(team: str | None) -> str | None:
    """Return the URL of a team's store, from the option ``state_url`` in section ``[TEAM=shoal]``. None: the store of
    this process."""
    return None if team is None else _option("state_url", team_name=team)


def apply_settings() -> None:
    """Set the environment variables of this process from the options that have a value. A variable that is set already
    keeps its value."""
    for option, variable in VARIABLES.items():
        value = _option(option)
        if value and os.environ.setdefault(variable, value) != value:
            log.warning(
                "the option %s in section [%s] of Airflow's configuration is ignored, because the environment variable "
                "%s has another value: remove one of them",
                option,
                SECTION,
                variable,
            )


log = logging.getLogger(__name__)

VARIABLE = "shoal_deployment"

_DESCRIPTION = "Id of this Airflow in the names of shoal's leases and jobs. Made by shoal; do not change it."

_LEGAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_LOCK_S = 60.0
"""Time to live of the lock under which a task makes the Variable, which takes two requests to Airflow's API."""


def deployment_of_task() -> str:
    """Return the id of this Airflow deployment. Call this function only in a task.

    If the Variable does not exist, because no scheduler with shoal's listener has started, as with ``dag.test()``, the
    task makes the Variable.

    The Variable is read once in the process of a task, because each read is a request to Airflow's API server.

    :raises InvalidArgumentError: The id is not legal, or the task must not make the Variable.
    """
    return _checked(_option("deployment") or _of_variable(os.getpid()))


@lru_cache(maxsize=1)
def _of_variable(_process: int) -> str:
    """Return the id in the Variable, which a task makes if it is missing. A fork of the process reads it anew."""
    from airflow.sdk import Variable

    if found := Variable.get(VARIABLE, default=None):
        return str(found)
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import ErrorResponse, GetVariable

    from shoal.jobs.journal.steps import store_lock
    from shoal.state import Store

    # A Variable that a task makes belongs to the task's team, and tasks of other teams could not read it.
    if has_teams():
        raise InvalidArgumentError(
            f'this Airflow has no id: set "deployment" in section [{SECTION}] of Airflow\'s configuration, or install '
            f"shoal where the scheduler runs, which then makes the Variable {VARIABLE}"
        )
    with store_lock(Store(), "the id of an Airflow deployment", _LOCK_S):
        if (found := Variable.get(VARIABLE, default=None)) is not None:
            return str(found)
        # `Variable.get` returns the default after any error of the API, and `Variable.set` would then overwrite the id.
        answer = task_runner.SUPERVISOR_COMMS.send(GetVariable(key=VARIABLE))
        if not isinstance(answer, ErrorResponse) or answer.error != ErrorType.VARIABLE_NOT_FOUND:
            raise AirflowRuntimeError(answer if isinstance(answer, ErrorResponse) else ErrorResponse())
        deployment = _new_id()
        Variable.set(VARIABLE, deployment, _DESCRIPTION)
    return deployment


def deployment_in_database() -> str | None:
    """Return the id of this Airflow deployment, in a process that has access to Airflow's database. None if no process
    has made the Variable yet."""
    found = _option("deployment")
    if found is None:
        from airflow.models.variable import Variable

        found = Variable.get(VARIABLE, default_var=None)
    return _checked(found) if found else None


def make_variable() -> None:
    """Make the Variable with a new id, unless there is an id. Call this function only in a process that has access to
    Airflow's database."""
    from airflow.models.variable import Variable
    from airflow.utils.session import create_session
    from sqlalchemy.exc import IntegrityError

    if deployment_in_database() is not None:
        return
    try:
        with create_session(scoped=False) as session:
            session.add(Variable(VARIABLE, _new_id(), _DESCRIPTION))  # type: ignore[no-untyped-call]
    except IntegrityError:
        # `Variable.set` would overwrite the id of a component that starts at the same time.
        if deployment_in_database() is None:
            log.warning(
                "the Variable %s belongs to a team, so tasks of other teams cannot read it: delete it, or set "
                '"deployment" in section [%s] of Airflow\'s configuration',
                VARIABLE,
                SECTION,
            )


def other_addresses(deployment: str) -> list[str]:
    """Record the web address of this Airflow in shoal's store, and return other addresses at which an Airflow with the
    same id has run tasks recently."""
    from airflow.sdk.configuration import conf

    from shoal.links import web_address
    from shoal.state import Store, deployments

    base_url = web_address(conf.get("api", "base_url", fallback=None))
    return deployments.record(Store(), deployment, base_url, time.time()) if base_url else []


def warn_of_copies() -> None:
    """Record the web address of this Airflow in shoal's store, and log a warning if another Airflow has the same id.
    Call this function only in a task."""
    deployment = deployment_of_task()
    if others := other_addresses(deployment):
        log.warning(
            "Airflow at %s has the same id in shoal's store as this Airflow, %s. If one has a copy of the other's "
            "database, they run each other's jobs: set another \"deployment\" in section [%s] of one Airflow's "
            "configuration. If this Airflow has moved, the warning ends two days after its last task at the old "
            "address",
            ", ".join(others),
            deployment,
            SECTION,
        )


def _option(name: str, **of_team: str) -> str | None:
    from airflow.sdk.configuration import conf

    return (conf.get(SECTION, name, fallback=None, **of_team) or "").strip() or None


def _checked(deployment: str) -> str:
    if not _LEGAL.fullmatch(deployment):
        raise InvalidArgumentError(
            f'the id of this Airflow, {shown(deployment)}, is not legal: set "deployment" in section [{SECTION}] of '
            f'Airflow\'s configuration, or the Variable {VARIABLE}, to 1 to 64 letters, digits, ".", "_" and "-"'
        )
    return deployment


def _new_id() -> str:
    return uuid4().hex[:12]


ENGINE = "airflow"

ONLY_LEASE = "lease_pool"
"""Default id of the task that leases the nodes. With this id, the name of the lease's holder contains only the DAG run,
and not the id of the task."""

_DEFAULT_OWNER = "airflow"
"""Owner that Airflow's configuration gives to tasks without an owner of their own. shoal does not use this owner as a
team."""


def team_of(context: Context, connection_team: str | None, owner: str) -> str | None:
    """Return the team for which a task acts: the team of its DAG run in an Airflow with several teams, else that of the
    connection, else the owner of the task. None for Airflow's default owner.

    :param connection_team: Team that the connection of the pool names.
    """
    # Airflow before 3.3 does not tell a task the team.
    of_run: str | None = getattr(context["dag_run"], "team_name", None)
    # The owner is free text, and must not make a task an administrator of all teams.
    return of_run or connection_team or (None if owner in (_DEFAULT_OWNER, ALL_TEAMS) else owner)


def holder_of(context: Context, lease: str | None = None) -> str:
    """Return the name of the holder to which a DAG run's lease and jobs belong:
    ``airflow:<deployment>:<dag_id>/<run_id>``.

    If a DAG run has several leases, each further lease has another holder,
    ``airflow:<deployment>:<dag_id>/<run_id>#<lease>``. A clean-up ends everything of one holder. So the clean-up after
    one lease does not end the nodes and jobs of another lease.

    A lease or an unfinished job of an older shoal has a name without the deployment. Until it ends, the run goes on
    with this name.

    :param lease: Id of the task that leases the nodes.
    """
    from shoal.jobs.cleanup import is_in_use

    dag_run = context["dag_run"]
    deployment = deployment_of_task()
    old, new = (holder_name(DagRunHolder(each, dag_run.dag_id, dag_run.run_id), lease) for each in (None, deployment))
    return old if is_in_use(old) else new


def is_single_task_test(context: Context) -> bool:
    """Return whether the DAG run exists only while ``airflow tasks test`` runs one of its tasks."""
    return str(context["dag_run"].run_id).startswith("__airflow_temporary_run_")


def holder_name(run: DagRunHolder, lease: str | None = None) -> str:
    """Build the name of the holder of one lease of a DAG run.

    :param lease: Id of the task that leases the nodes.
    """
    return run.name if lease in (None, ONLY_LEASE) else f"{run.name}#{lease}"


def task_key(ti: Any) -> str:
    """Return a task instance's name, which is unique within the DAG run. By this name, a retry of the task finds the
    task's job."""
    return f"{ti.task_id}/{ti.map_index}"
