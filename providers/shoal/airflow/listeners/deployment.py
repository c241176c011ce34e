"""Listener that gives this Airflow an id when one of its components starts (see `shoal.airflow.deployment`), and each
task the store of its team."""

from __future__ import annotations

import logging
import os
from typing import Any

from airflow.listeners import hookimpl

from shoal.airflow.deployment import make_variable
from shoal.airflow.settings import VARIABLES, has_teams, store_of

log = logging.getLogger(__name__)


@hookimpl
def on_starting(component: Any) -> None:
    """Make the Variable with the id of this Airflow deployment, if the deployment has no id yet. Airflow calls this
    function when the scheduler, the triggerer, the DAG processor or the process of a task starts.

    :param component: The component: a row of Airflow's database, or an object of another class in the process of a
        task.
    """
    if not hasattr(component, "_sa_instance_state"):
        return
    try:
        make_variable()
    # The error is only logged, because a component without an id of the deployment can do everything else.
    except Exception:
        log.warning("the id of this Airflow for shoal could not be made", exc_info=True)


@hookimpl
def on_task_instance_running(previous_state: Any, task_instance: Any) -> None:
    """Use the store of the DAG run's team, if Airflow's configuration names one here. Airflow calls this function in
    the process of a task.

    :param previous_state: State of the task before.
    :param task_instance: The task instance.
    """
    if not has_teams():
        return
    # Airflow before 3.3 does not tell a task the team.
    if url := store_of(getattr(task_instance.get_template_context()["dag_run"], "team_name", None)):
        os.environ[VARIABLES["state_url"]] = url
