"""Build the name with which a DAG run holds (owns) leases and jobs: ``airflow:<deployment>:<dag_id>/<run_id>``. Also
find the team to which the leases belong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.pool.holder import DagRunHolder

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

ENGINE = "airflow"

ONLY_LEASE = "lease_pool"
"""Default id of the task that leases the nodes. With this id, the name of the lease's holder contains only the DAG run,
and not the id of the task."""

_DEFAULT_OWNER = "airflow"
"""Owner that Airflow's configuration gives to tasks without an owner of their own. shoal does not use this owner as a
team."""


def team_of(owner: str) -> str | None:
    """Return the team to which a DAG's leases belong: the owner of its tasks. None for Airflow's default owner.

    :param owner: The task's owner.
    """
    return None if owner == _DEFAULT_OWNER else owner


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
