"""Build the name with which a DAG run holds (owns) leases and jobs: ``airflow:<deployment>:<dag_id>/<run_id>``. Also
find the team for which a task acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.pool.holder import ALL_TEAMS, DagRunHolder

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

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

    :param context: Airflow's context of the task.
    :param connection_team: Team that the connection of the pool names.
    :param owner: The task's owner.
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

    :param context: Airflow's context of a task of the DAG run.
    :param lease: Id of the task that leases the nodes.
    """
    from shoal.airflow.deployment import deployment_of_task
    from shoal.jobs.cleanup import is_in_use

    dag_run = context["dag_run"]
    deployment = deployment_of_task()
    old, new = (holder_name(DagRunHolder(each, dag_run.dag_id, dag_run.run_id), lease) for each in (None, deployment))
    return old if is_in_use(old) else new


def is_single_task_test(context: Context) -> bool:
    """Return whether the DAG run exists only while ``airflow tasks test`` runs one of its tasks.

    :param context: Airflow's context of a task of the DAG run.
    """
    return str(context["dag_run"].run_id).startswith("__airflow_temporary_run_")


def holder_name(run: DagRunHolder, lease: str | None = None) -> str:
    """Build the name of the holder of one lease of a DAG run.

    :param run: The DAG run.
    :param lease: Id of the task that leases the nodes.
    """
    return run.name if lease in (None, ONLY_LEASE) else f"{run.name}#{lease}"


def task_key(ti: Any) -> str:
    """Return a task instance's name, which is unique within the DAG run. By this name, a retry of the task finds the
    task's job.

    :param ti: The task instance.
    """
    return f"{ti.task_id}/{ti.map_index}"
