"""Base class of operators that run a job on a pool, and a check that the DAG leases nodes of this pool.

Also here: the digest of a task as it is written in the DAG file, by which a retry recognises its job.
"""

from __future__ import annotations

import difflib
import os
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, TaskGroup, XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowTaskTimeout

from shoal.airflow._run_holder import task_key, team_of
from shoal.airflow.base.checked import LabelledOperator
from shoal.airflow.base.pool import WaitingOperator, WorkerLostError, end_if_worker_is_lost
from shoal.airflow.checks import arguments_of, is_known, pool_of
from shoal.airflow.credentials import environment_of, secret_variable
from shoal.airflow.database_urls import database_url
from shoal.airflow.links import LINKS, links_of, page_links, show_links
from shoal.airflow.operators.nodes import LeasePoolOperator, ScaleClusterOperator
from shoal.airflow.retries import no_retry_of_permanent_errors
from shoal.errors import LeaseEndedError, NoTokenError, PoolDownError, PoolElsewhereError, ShoalError
from shoal.pool.spec import PoolSpec, is_uri
from shoal.training.pytorch.program import is_name
from shoal.training.pytorch.script import Script

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec, JobHandle, JobResult, TaskTry

_JOB_ID = "shoal_job_id"
"""Key under which the id of the task's job is stored in Airflow's task state."""

_KILL_CHECK_S = 0.2
"""Seconds between two checks whether Airflow has killed the task. A killed task has only 5 s to end."""


class JobOperator(LabelledOperator, WaitingOperator):
    """Base class of operators that submit a job, copy its log to the task's log, and wait for its result.

    :param durable: Whether a retry attaches to the job of an earlier try if this job still runs, and takes the job's
        result if the job has succeeded. False: a retry ends the job of an earlier try and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when Airflow ends the task, because a user clears or marks the
        task, or because the task times out. False: the job goes on until a try of the task attaches to it, or the
        teardown ends it.
    :param credential_conn_ids: Ids of connections whose credentials the job gets, for storage and MLflow (see
        `shoal.airflow.credentials`). They are read when the job is submitted, and neither stored nor rendered.
    """

    operator_extra_links = LINKS

    def __init__(
        self,
        *,
        durable: bool = True,
        cancel_on_kill: bool = True,
        credential_conn_ids: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.credential_conn_ids = credential_conn_ids
        self.durable = durable
        self.cancel_on_kill = cancel_on_kill
        self.links: dict[str, str] = {}
        self._deadline: float | None = None
        self._is_resumed = False
        self._done: tuple[AnyJobSpec, JobResult] | None = None

    def prepare_template(self) -> None:
        """Warn if no task of the DAG leases nodes of this task's pool (see `missing_lease`). Airflow calls this method
        when the DAG is complete."""
        if (message := missing_lease(self)) is not None:
            warnings.warn(message, stacklevel=2)

    @abstractmethod
    def job_spec(self, context: Context) -> AnyJobSpec:
        """Build the job's spec from the operator's arguments.

        :param context: Airflow's context of the task.
        """

    def value_of(self, result: JobResult) -> Any:
        """Convert the result of a job to the value that the task returns.

        :param result: Result of the job.
        """
        return result.to_dict()

    def record_success(self, context: Context, spec: AnyJobSpec, result: JobResult) -> None:
        """Store information about a successful job for other tasks. By default, nothing is stored.

        :param context: Airflow's context of the task.
        :param spec: Spec of the job.
        :param result: Result of the job.
        :raises AirflowSkipException: The task has to end as skipped.
        """

    def record_failure(self, context: Context, error: ShoalError) -> None:
        """Store information about a failed job for other tasks, before the task fails. By default, nothing is stored.

        :param context: Airflow's context of the task.
        :param error: The cause of the failure.
        """

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> Any:
        """Submit the job (or attach to the job of an earlier try of this task), wait until the job ends, and return the
        job's result as a dict."""
        return self._execute(context)

    # `execute_complete` calls `_execute` and not `execute`, because Airflow warns if another method calls `execute`.
    def _execute(self, context: Context) -> Any:
        with self._recording_failures(context):
            spec = self.job_spec(context)
            if not self.wait_for_completion:
                handle = self.submit_job(spec, context)
                return {"job_id": handle.job_id, "attempt": handle.attempt, "pool": handle.pool}
            result = self.run_job(spec, context)
        self.record_success(context, spec, result)
        return self.value_of(result)

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], job: Mapping[str, Any]) -> Any:
        """Continue the task after its deferral: return the result of the job as a dict, or raise the job's error."""
        if self.is_resubmitted(event, job):
            return self._execute(context)
        with self._recording_failures(context):
            spec, result = self.resume_job(event, job, context)
        self.record_success(context, spec, result)
        return self.value_of(result)

    @contextmanager
    def _recording_failures(self, context: Context) -> Iterator[None]:
        try:
            yield
        except ShoalError as error:
            self.record_failure(context, error)
            raise

    def submit_job(self, spec: AnyJobSpec, context: Context) -> JobHandle:
        """Submit the job, or attach to the job of an earlier try of this task.

        :param spec: Spec of the job.
        :param context: Airflow's context of the task.
        """
        from shoal.jobs import submit

        # A spec that names a pool has precedence over Airflow's default connection.
        hook = self.hook
        if self.pool_name or self.compute_pool_conn_id or (not spec.run_config.pool_name and hook.spec):
            spec = spec.on_pool(hook.pool().name)
        task = self._task_try(context)
        with self._naming_the_setup(context):
            handle = submit(
                spec,
                holder=self.holder_in(context),
                key=task.key,
                task=task,
                detached=not self.wait_for_completion,
                connection_url=database_url,
                secret_of=secret_variable,
                environment=environment_of(self.credential_conn_ids),
                needs_lease=self.lease is not None,
                team=team_of(context, hook.team, self.owner),
            )
        self.log.info("job %s, attempt %d, on pool %s", handle.job_id, handle.attempt, handle.pool)
        if handle.was_collected:
            self.log.info(
                "an earlier try of the task had the job's result: it is used again, until the task is cleared"
            )
        self._show_job_id(handle, context)
        # The link is set before the job has ended, so that the task has the link even if the job fails.
        self.links = page_links(handle.job_id)
        show_links(self.links, context["ti"])
        return handle

    @contextmanager
    def _naming_the_setup(self, context: Context) -> Iterator[None]:
        """Add to the error about a pool that is down, or a lease that has ended, which task leases the nodes."""
        try:
            yield
        except (PoolDownError, LeaseEndedError) as error:
            if self.lease is None or isinstance(error, PoolElsewhereError | NoTokenError):
                raise
            raise type(error)(f"{error}. {self.setup_advice(context)}") from error

    def run_job(self, spec: AnyJobSpec, context: Context) -> JobResult:
        """Submit the job, or attach to the job of an earlier try of this task, and return the job's result.

        A deferrable task is deferred until the job has ended. After the deferral, Airflow calls `execute_complete`.

        :param spec: Spec of the job.
        :param context: Airflow's context of the task.
        """
        handle = self.submit_job(spec, context)
        # Airflow does not defer a killed task. So a killed task goes on to `_wait_for`, which cancels the job.
        if self.deferrable and not self.is_killed:
            # The triggerer has no credentials, so an Airflow worker has to send them to the job's driver. A queued job
            # has no driver yet. When its driver has started, the trigger fires an event, and the task continues in a
            # worker, which sends the credentials (see `is_resubmitted`).
            handle.deliver_credentials(while_queued=False)
        if self.deferrable and not self.is_killed and not handle.has_ended:
            self._defer_to(handle, context)
        return self._wait_for(handle)

    def is_resubmitted(self, event: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
        """Return whether the job's driver waits for credentials. If so, the task has to repeat `execute`.

        The task then attaches to its job, even if `durable` is False or the DAG file has changed, and sends the
        credentials.

        :param event: Event of the trigger.
        :param job: The job, as `_defer_to` has described it.
        """
        if not event.get("wants_credentials"):
            return False
        self.durable = self._is_resumed = True
        self._deadline = job.get("deadline")
        return True

    def resume_job(
        self, event: Mapping[str, Any], job: Mapping[str, Any], context: Context
    ) -> tuple[AnyJobSpec, JobResult]:
        """Continue the task after its deferral: return the spec and the result of the job.

        The event may belong to the trigger of an earlier try. Airflow deletes the trigger of a task that is cleared,
        and SQLite gives the id of the deleted trigger to the next one. So if the job of this try goes on, the task is
        deferred again.

        :param event: Event of the trigger.
        :param job: The job, as `_defer_to` has described it.
        :param context: Airflow's context of the task.
        :raises AirflowTaskTimeout: The task has exceeded its `execution_timeout`. The task's job is cancelled.
        """
        from shoal.jobs import attach

        handle = attach(job["job_id"], job["attempt"], submissions=job["submissions"], actor=self.holder_in(context))
        self.links = page_links(handle.job_id)
        is_of_job = all(event[name] == value for name, value in job.items() if name != "deadline")
        timed_out = event["timed_out"] and is_of_job
        if self.deferrable and not (timed_out or self.is_killed or handle.has_ended):
            self._deadline = job.get("deadline")
            self._defer_to(handle, context)
        if timed_out and not handle.has_ended:
            reason = f"task {self.task_id} was not done within its execution_timeout of {self.execution_timeout}"
            self._cancel(handle, reason)
            raise AirflowTaskTimeout(reason)
        return handle.spec, self._wait_for(handle, event["log_position"] if is_of_job else 0)

    def _defer_to(self, handle: JobHandle, context: Context) -> None:
        from shoal.airflow.triggers.jobs import JobTrigger

        job: dict[str, Any] = {"job_id": handle.job_id, "attempt": handle.attempt, "submissions": handle.submissions}
        limit = self.execution_timeout
        deadline = self._deadline or (None if limit is None else time.time() + limit.total_seconds())
        trigger = JobTrigger(
            **job,
            pool=handle.pool,
            task_try=context["ti"].try_number,
            cancel_on_kill=self.cancel_on_kill,
            poll_interval=self.poll_interval,
            deadline=deadline,
        )
        kwargs = {"job": {**job, "deadline": deadline}}
        self.defer(trigger=trigger, method_name="execute_complete", kwargs=kwargs)

    def _wait_for(self, handle: JobHandle, log_position: int = 0) -> JobResult:
        # Airflow ends a task with a signal, which raises an exception in the main thread. This exception must not
        # interrupt a transaction, so another thread waits for the job.
        stop = Event()
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(handle.wait, on_log=self.log.info, stop=stop, log_position=log_position)
            try:
                while not wait([result], timeout=_KILL_CHECK_S).done:
                    self.end_if_killed()
                    end_if_worker_is_lost()
            except WorkerLostError:
                stop.set()
                raise
            # Airflow has killed the task, or the task has exceeded its execution_timeout. Do not cancel the job if a
            # newer try of the task has attached to it: if Airflow loses contact with a worker or a scheduler, Airflow
            # starts the new try before it kills the old one.
            except BaseException as end:
                try:
                    self._cancel(handle, str(end) or f"task {self.task_id} was ended")
                finally:
                    stop.set()
                raise
            self._set_links(handle, result.result())
            self._done = handle.spec, result.result()
            return result.result()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        """Return the data and models that the job has read and written; None if the task has not waited for a job.
        Airflow's OpenLineage provider calls this method when the task has ended.

        :param task_instance: The task instance.
        """
        # Imported only here, because the module needs the OpenLineage provider, which may not be installed.

        from shoal.airflow.operators.lineage import lineage_of

        return None if self._done is None else lineage_of(*self._done)

    def _set_links(self, handle: JobHandle, result: JobResult) -> None:
        from shoal.pool.api import ComputePool

        try:
            self.links = links_of(
                handle.spec, result, PoolSpec.parse(ComputePool(handle.pool, is_named=False).describe().uri)
            )
        # The job has succeeded, so the task must not fail because a link cannot be built.
        except Exception:
            self.log.warning("the links of the task could not be found", exc_info=True)

    def _cancel(self, handle: JobHandle, reason: str) -> None:
        """Cancel the task's job, unless `cancel_on_kill` is False or a newer try of the task has attached to the
        job."""
        if not self.cancel_on_kill:
            self.log.info("job %s goes on (cancel_on_kill=False)", handle.job_id)
        elif not handle.cancel(reason, unless_resubmitted=True):
            self.log.info(
                "job %s is not cancelled: it has ended, or a newer try of the task has attached to it", handle.job_id
            )

    def _task_try(self, context: Context) -> TaskTry:
        """Describe this try of the task: its number, and the number of the last try before a user cleared the task (0
        if the task was not cleared)."""
        from shoal.jobs import TaskTry

        ti = context["ti"]
        # At first, `max_tries` is equal to `retries`. When a task is cleared, Airflow increases `max_tries` by the
        # number of tries so far.
        cleared = ti.max_tries - (self.retries or 0)
        # `cleared` is wrong if the task's `retries` was changed after the run began. If no earlier try has the number
        # `cleared`, 0 is used instead.
        is_a_try = 0 < cleared < ti.try_number
        digest = None if self._is_resumed else digest_as_written(self)
        return TaskTry(task_key(ti), ti.try_number, cleared if is_a_try else 0, durable=self.durable, digest=digest)

    def _show_job_id(self, handle: JobHandle, context: Context) -> None:
        """Store the job's id in the task's state, which Airflow 3.3 and later show in the UI. shoal never reads this
        id."""
        state = context.get("task_state_store")
        if state is None:
            return
        try:
            state.set(_JOB_ID, handle.job_id)
        # The job runs, so the task must not fail if the job's id cannot be stored.
        except Exception:
            self.log.warning("the job's id could not be stored in the task's state", exc_info=True)


def missing_lease(task: BaseOperator | MappedOperator) -> str | None:
    """Return a warning if a task runs its job on a pool and no task of the DAG leases nodes of this pool; otherwise
    None.

    A pool that is always up needs no lease. So there is no warning for a task that gives only the name of a pool, and
    is outside of all `pool_for_run` blocks.

    :param task: Task of a complete DAG that submits a job.
    """
    arguments = arguments_of(task)
    name, dag = arguments.get("pool_name"), task.get_dag()
    if dag is None or not isinstance(name, str) or not (arguments.get("lease") or is_uri(name)):
        return None
    lessees = [one for one in dag.tasks if isinstance(one, LeasePoolOperator | ScaleClusterOperator)]
    # If the name of a pool is missing or contains a template, there is no warning, because the pool is not known before
    # the run.
    if not all(isinstance(other, str) and is_known(other) for other in [name, *(one.pool_name for one in lessees)]):
        return None
    pool, leased = pool_of(arguments), [pool_of(vars(one)) or "" for one in lessees]
    if pool is None or pool in leased:
        return None
    near = difflib.get_close_matches(pool, leased, n=1)
    return f"task {task.task_id} runs on the pool {pool}, but no task of the DAG leases nodes of this pool: " + (
        f"did you mean {near[0]}?"
        if near
        else "use pool_for_run; if the pool is always up, pass only its name as pool_name instead"
    )


_ARGUMENTS = (
    "framework",
    "train_func",
    "op_args",
    "op_kwargs",
    "spec",
    "model",
    "dataset",
    "output_path",
    "by",
    "function",
    "function_kwargs",
    "estimator",
)
"""Arguments of operators that say what a job does."""

_OF_MAPPED = ("expand_input", "op_kwargs_expand_input", "python_callable")
"""Attributes of a mapped task that say the same. Only those of decorated functions have the last two."""


def digest_as_written(operator: BaseOperator) -> str:
    """Return the digest of a task's framework, of its function's code, and of its arguments before Airflow renders
    templates and maps values.

    :param operator: Operator of the task, whose templates may be rendered already.
    """
    # Imported only here, so that Airflow loads DAG files quickly.
    from shoal.training.pickling import code_digest

    # Airflow renders a copy of the DAG's task.
    dag = operator.get_dag()
    task = operator if dag is None else dag.task_dict[operator.task_id]
    arguments = arguments_of(task)
    written: dict[str, Any] = {name: arguments.get(name) for name in _ARGUMENTS}
    script = written["train_func"]
    if isinstance(script, str | os.PathLike) and is_known(script) and not is_name(script):
        written["train_func"] = Script.read(script).text
    if isinstance(task, MappedOperator):
        written["mapped"] = [getattr(task, name, None) for name in _OF_MAPPED]
    return code_digest(written, _name)


def _name(value: Any) -> str | None:
    """Return the text that stands for the result of another task, or for a part of the DAG."""
    return repr(value) if isinstance(value, XComArg | BaseOperator | MappedOperator | TaskGroup | DAG) else None
