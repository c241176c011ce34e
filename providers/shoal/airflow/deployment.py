"""Find the id of this Airflow deployment. Names of holders contain the id, so that two Airflows with one store do not
take each other's DAG runs for their own.

The id is the option `deployment` in section ``[shoal]``, else the Airflow Variable ``shoal_deployment``. The listener
makes this Variable when the scheduler starts.
"""

from __future__ import annotations

import logging
import os
import re
import time
from functools import lru_cache
from uuid import uuid4

from shoal.airflow.settings import SECTION, has_teams
from shoal.errors import InvalidArgumentError, shown

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
    return _checked(_configured() or _of_variable(os.getpid()))


@lru_cache(maxsize=1)
def _of_variable(_process: int) -> str:
    """Return the id in the Variable. A fork of the process reads it anew."""
    from airflow.sdk import Variable

    return Variable.get(VARIABLE, default=None) or _made_by_task()


def deployment_in_database() -> str | None:
    """Return the id of this Airflow deployment, in a process that has access to Airflow's database. None if no process
    has made the Variable yet."""
    found = _configured()
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
    same id has run tasks recently.

    :param deployment: Id of this Airflow deployment.
    """
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


def _configured() -> str | None:
    from airflow.sdk.configuration import conf

    return (conf.get(SECTION, "deployment", fallback=None) or "").strip() or None


def _checked(deployment: str) -> str:
    if not _LEGAL.fullmatch(deployment):
        raise InvalidArgumentError(
            f'the id of this Airflow, {shown(deployment)}, is not legal: set "deployment" in section [{SECTION}] of '
            f'Airflow\'s configuration, or the Variable {VARIABLE}, to 1 to 64 letters, digits, ".", "_" and "-"'
        )
    return deployment


def _new_id() -> str:
    return uuid4().hex[:12]


def _made_by_task() -> str:
    from airflow.sdk import Variable

    from shoal.jobs.journal.locks import store_lock
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
        _check_that_variable_is_missing()
        deployment = _new_id()
        Variable.set(VARIABLE, deployment, _DESCRIPTION)
    return deployment


def _check_that_variable_is_missing() -> None:
    """Raise an error if Airflow could not say whether the Variable exists.

    `Variable.get` returns the default after any error of the API, and `Variable.set` would then overwrite the id.
    """
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import ErrorResponse, GetVariable

    answer = task_runner.SUPERVISOR_COMMS.send(GetVariable(key=VARIABLE))
    if not isinstance(answer, ErrorResponse) or answer.error != ErrorType.VARIABLE_NOT_FOUND:
        raise AirflowRuntimeError(answer if isinstance(answer, ErrorResponse) else ErrorResponse())
