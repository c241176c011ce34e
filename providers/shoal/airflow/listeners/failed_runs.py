"""Listener that records in shoal's store that a DAG run or a task has failed, so that the jobs and leases of the run
or task end soon.

Normally a run's teardown task ends the run's jobs and leases. If no teardown task runs, as after `dagrun_timeout` or if
the setup task was killed, this listener ends the jobs and leases sooner than the janitor would. The listener only
writes to the store: the drivers of the jobs read there that they have to end, and the reconcilers read that leases have
expired.
"""

from __future__ import annotations

import logging
from functools import partial
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl

from shoal.airflow._run_holder import holder_name, run_of, task_key
from shoal.background_threads import BackgroundThread

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

log = logging.getLogger(__name__)

_STORE_THREADS = BoundedSemaphore(2)
"""Limits the number of threads that use the store at a time, because many tasks may fail together, and each thread
needs a connection to the store."""


@hookimpl
def on_dag_run_failed(dag_run: DagRun, msg: str) -> None:
    """Record in shoal's store that the jobs and leases of a failed DAG run have to end. Airflow calls this function in
    the scheduler and the API server.

    :param dag_run: The DAG run.
    :param msg: Why the run has failed.
    """
    run = holder_name(dag_run.dag_id, dag_run.run_id)
    _end_in_thread(
        f"its DAG run failed: {msg}",
        owns_lease=lambda holder: run_of(holder) == run,
        owns_job=lambda holder, key: run_of(holder) == run,
    )


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:
    """When a task has failed, record in shoal's store that the job and the lease of this task have to end.

    This function acts only on a task whose process or worker has died, and which is not retried. In all other cases,
    the task's own process ends the job and the lease, as the arguments of the operator say.

    :param previous_state: State of the task before. None if a user has marked the task as failed.
    :param task_instance: The task instance: a row of Airflow's database in the scheduler and the API server, or an
        object of another class in the process of a task.
    :param error: Error of the task.
    """
    is_in_database = hasattr(task_instance, "_sa_instance_state")
    if not is_in_database or previous_state is None or task_instance.state != "failed":
        return
    run = holder_name(task_instance.dag_id, task_instance.run_id)
    requested = holder_name(task_instance.dag_id, task_instance.run_id, task_instance.task_id)
    key = task_key(task_instance)
    _end_in_thread(
        f"its task {task_instance.task_id} failed: {error}",
        owns_lease=lambda holder: holder == requested,
        owns_job=lambda holder, of_task: run_of(holder) == run and of_task == key,
    )


def _end_in_thread(reason: str, **owned: Any) -> None:
    """End jobs and leases in a new thread, because the scheduler must not wait for shoal's store."""
    BackgroundThread(partial(_end, reason, **owned), name="shoal-failed-run").start()


def _end(reason: str, **owned: Any) -> None:
    try:
        with _STORE_THREADS:
            from shoal.jobs.cleanup import end_in_store

            for line in end_in_store(reason=reason, **owned):
                log.info(line)
    # The error is only logged, because the DAG `pool_janitor` ends the remaining jobs and leases later.
    except Exception:
        log.warning("the end of a run could not be recorded in shoal's store (%s)", reason, exc_info=True)
