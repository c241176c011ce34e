"""Build the name with which a DAG run holds (owns) leases and jobs: ``airflow:<dag_id>/<run_id>``. Also find the team
to which the leases belong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    """Return the name of the holder to which a DAG run's lease and jobs belong: ``airflow:<dag_id>/<run_id>``.

    If a DAG run has several leases, each further lease has another holder, ``airflow:<dag_id>/<run_id>#<lease>``. A
    clean-up ends everything of one holder. So the clean-up after one lease does not end the nodes and jobs of another
    lease.

    :param context: Airflow's context of a task of the DAG run.
    :param lease: Id of the task that leases the nodes.
    """
    dag_run = context["dag_run"]
    return holder_name(dag_run.dag_id, dag_run.run_id, lease)


def holder_name(dag_id: str, run_id: str, lease: str | None = None) -> str:
    """Build the name of a DAG run's holder from the ids of the DAG and of the run. Code that has Airflow's context
    calls `holder_of` instead.

    :param dag_id: Id of the DAG.
    :param run_id: Id of the DAG run.
    :param lease: Id of the task that leases the nodes.
    """
    run = f"{ENGINE}:{dag_id}/{run_id}"
    return run if lease in (None, ONLY_LEASE) else f"{run}#{lease}"


def task_key(ti: Any) -> str:
    """Return a task instance's name, which is unique within the DAG run. By this name, a retry of the task finds the
    task's job.

    :param ti: The task instance.
    """
    return f"{ti.task_id}/{ti.map_index}"


def run_of(holder: str) -> str:
    """Return a holder's name without the lease id at its end (``#<lease>``). The rest of the name identifies the DAG
    run."""
    # Everything after the first "#" is the id of the lease. The name of the DAG run contains no "#", because Airflow's
    # default pattern for run ids does not allow this character.
    return holder.partition("#")[0]
