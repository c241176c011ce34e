"""Clear the task instances that a DAG run needs to train again what failed, and no others.

Airflow's own "clear only failed tasks" leaves out the setup task of `pool_for_run`, which has succeeded, and the
training then finds no pool. The command ``shoal train-again`` and the page in Airflow's API server use this module.
Both have access to Airflow's database, which tasks do not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.serialization.definitions.dag import SerializedDAG
    from sqlalchemy.orm import Session

Instances = list[str | tuple[str, int]]
"""Task instances as Airflow's API takes them: the id of a task, or the id and the map index."""

app = typer.Typer(add_completion=False)


@app.command()
def command(
    dag_id: Annotated[str, typer.Argument(metavar="DAG", help="Id of the DAG.")],
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Id of the DAG run.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the task instances.")] = False,
) -> None:
    """Train again what failed in a run of a DAG: clear the failed task instances, the setup and teardown tasks of their
    pools, and the tasks after them. Trainings that have succeeded keep their results. Run the command where Airflow's
    own commands run."""
    from airflow.utils.session import create_session

    with create_session() as session:
        dag, instances = instances_to_clear(dag_id, run_id, session)
        if not dry_run:
            dag.clear(task_ids=instances, run_id=run_id, session=session)
    typer.echo(f"{'would clear' if dry_run else 'cleared'} {instances_text(instances)}")


def request_body(dag_id: str, run_id: str) -> dict[str, Any]:
    """Return the body of the request ``clearTaskInstances`` to Airflow's API that has the same effect as the command.

    :raises InvalidArgumentError: There is no such run, or none of its tasks has failed.
    """
    from airflow.utils.session import create_session

    with create_session() as session:
        _, instances = instances_to_clear(dag_id, run_id, session)
    return {"dry_run": False, "dag_run_id": run_id, "task_ids": instances, "only_failed": False}


def instances_to_clear(dag_id: str, run_id: str, session: Session) -> tuple[SerializedDAG, Instances]:
    """Return a run's DAG, and the task instances that have failed or could not run because others had failed, with the
    setup and teardown tasks around them and the instances after them.

    :raises InvalidArgumentError: There is no such run, or none of its tasks has failed.
    """
    from airflow.models.dagbag import DBDagBag
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import find_relevant_relatives
    from airflow.utils.state import TaskInstanceState
    from sqlalchemy import select

    run = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
    dag = run and DBDagBag().get_dag_for_run(run, session=session)
    if run is None or dag is None:
        raise InvalidArgumentError(
            f"Airflow has no run {run_id} of the DAG {dag_id}: `airflow dags list-runs` lists them"
        )
    states = [TaskInstanceState.FAILED, TaskInstanceState.UPSTREAM_FAILED]
    failed = {(ti.task_id, ti.map_index) for ti in run.get_task_instances(state=states, session=session)}
    failed = {(task_id, index) for task_id, index in failed if dag.has_task(task_id)}
    if not failed:
        raise InvalidArgumentError(f"no task has failed in run {run_id} of the DAG {dag_id}, so nothing is cleared")
    whole = {task_id for task_id, index in failed if index < 0}
    mapped = {(task_id, index) for task_id, index in failed if index >= 0}
    after = find_relevant_relatives(whole, mapped, dag=dag, run_id=run_id, direction="downstream", session=session)
    around = {
        each.task_id
        for task_id, _ in failed
        for each in dag.get_task(task_id).get_upstreams_only_setups_and_teardowns()
    }
    tasks = whole | around | {one for one in after if isinstance(one, str)}
    instances = mapped | {one for one in after if not isinstance(one, str)}
    return dag, [*sorted(tasks), *sorted((task_id, index) for task_id, index in instances if task_id not in tasks)]


def instances_text(instances: Instances) -> str:
    """Return task instances as a text, such as ``lease_pool, train[3]``."""
    # Imported here, because `shoal --help` loads this module, and Airflow takes seconds.
    from shoal.airflow.results import instance_name

    return ", ".join(one if isinstance(one, str) else instance_name(*one) for one in instances)
