"""Listeners in Airflow's processes: they give this Airflow an id, and record failed runs and tasks in shoal's store.

Normally a run's teardown task ends the run's jobs and leases. If no teardown task runs, as after `dagrun_timeout` or if
the setup task was killed, the listener ends the jobs and leases sooner than the janitor would. It only writes to the
store of the DAG's team: the drivers of the jobs read there that they have to end, and the reconcilers read that leases
have expired.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from functools import partial
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin

from shoal.airflow import deployment
from shoal.background_threads import BackgroundThread
from shoal.pool.holder import DagRunHolder
from shoal.secrets.redaction import one_line

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun


log = logging.getLogger(__name__)

_STORE_THREADS: dict[str, BoundedSemaphore] = defaultdict(lambda: BoundedSemaphore(2))
"""Limits the number of threads that use a store at a time, because many tasks may fail together, and each thread
needs a connection to the store. Each store has its own limit, so that one that does not answer delays no other team."""

_failing: set[str] = set()
"""Stores in which the end of a run could not be recorded at the last try. Any failed run of any DAG is recorded, and a
store that is away must not fill the log of the scheduler."""


@hookimpl
def on_dag_run_failed(dag_run: DagRun, msg: str) -> None:
    """Record in shoal's store that the jobs and leases of a failed DAG run have to end. Airflow calls this function in
    the scheduler and the API server."""
    _in_thread(f"its DAG run failed: {msg}", dag_run.dag_id, dag_run.run_id)


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:
    """When a task has failed and is not retried, store the cause for messages in the task's process, or else record in
    shoal's store that the job and the lease of this task have to end.

    The record is only for a task whose process or worker has died. In all other cases, the task's own process ends the
    job and the lease, as the arguments of the operator say. The cause is stored only if the DAG file uses shoal.

    :param previous_state: State of the task before. None if a user has marked the task as failed.
    :param task_instance: The task instance: a row of Airflow's database in the scheduler and the API server, or an
        object of another class in the process of a task.
    """
    if previous_state is None or task_instance.state != "failed":
        return
    if not hasattr(task_instance, "_sa_instance_state"):
        # Only DAG files that use shoal load this module.
        if results := sys.modules.get("shoal.airflow.results"):
            results.store_cause(results.error_text(error), task_instance)
        return
    reason = f"its task {task_instance.task_id} failed: {error}"
    _in_thread(
        reason, task_instance.dag_id, task_instance.run_id, task_instance.task_id, deployment.task_key(task_instance)
    )


def _in_thread(*end: str) -> None:
    """Call `_end` in a new thread, because the scheduler must not wait for shoal's store.

    The thread also reads Airflow's database. In the scheduler's thread, this read would commit the scheduler's
    transaction.
    """
    BackgroundThread(partial(_end, *end), name="shoal-failed-run").start()


def _end(reason: str, dag_id: str, run_id: str, task_id: str | None = None, key: str | None = None) -> None:
    """End the jobs and leases of a DAG run, or those of one of its tasks, in the store of the DAG's team."""
    # Imported here, because every process of Airflow imports this module.
    from shoal.jobs.cleanup import end_in_store
    from shoal.state.home import default_url, use_store

    store = ""
    try:
        if deployment.has_teams():
            from airflow.models.dag import DagModel

            use_store(deployment.store_of(DagModel.get_team_name(dag_id)))
        store = default_url()
        with _STORE_THREADS[store]:
            # Leases and jobs of an older shoal have names without the deployment.
            runs = {DagRunHolder(each, dag_id, run_id) for each in (None, deployment.deployment_in_database())}
            of_task = {deployment.holder_name(run, task_id) for run in runs}
            for line in end_in_store(
                reason=reason,
                owns_lease=lambda holder: holder in of_task if task_id else DagRunHolder.of(holder) in runs,
                owns_job=lambda holder, its: DagRunHolder.of(holder) in runs and key in (None, its),
            ):
                log.info(line)
        _failing.difference_update({store, ""})
    # The error is only logged, because the DAG `pool_janitor` ends the remaining jobs and leases later.
    except Exception as error:
        log.debug("the end of a run could not be recorded (%s)", reason, exc_info=True)
        if store not in _failing:
            _failing.add(store)
            log.warning(
                "the end of run %s of DAG %s could not be recorded in shoal's store (%s: %s). Until this works again, "
                "further failed runs are not reported here; the DAG pool_janitor ends their jobs and leases",
                run_id,
                dag_id,
                type(error).__name__,
                one_line(str(error)),
            )


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
        deployment.make_variable()
    # The error is only logged, because a component without an id of the deployment can do everything else.
    except Exception:
        log.warning("the id of this Airflow for shoal could not be made", exc_info=True)


@hookimpl
def on_task_instance_running(previous_state: Any, task_instance: Any) -> None:
    """Use the store of the DAG run's team, if Airflow's configuration names one here. Airflow calls this function in
    the process of a task."""
    if not deployment.has_teams():
        return
    # Airflow before 3.3 does not tell a task the team.
    if url := deployment.store_of(getattr(task_instance.get_template_context()["dag_run"], "team_name", None)):
        os.environ[deployment.VARIABLES["state_url"]] = url


class ShoalListeners(AirflowPlugin):
    """Plugin that listens to failed runs and to the start of components. Airflow loads the plugin at the start of each
    of its processes: scheduler, API server, triggerer, DAG processor, and the process of each task."""

    name = "shoal_listeners"
    listeners = [sys.modules[__name__]]  # noqa: RUF012 - Airflow's own shape

    @classmethod
    def on_load(cls, *args: Any, **kwargs: Any) -> None:
        """Set the environment variables of the options in section ``[shoal]``, for this process and the processes that
        it starts."""
        deployment.apply_settings()
