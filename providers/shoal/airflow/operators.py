"""Operators on compute pools: scale and lease nodes, train, predict, and clean up.

Each operator calls one function of shoal's API. The leases and jobs belong to the DAG run (the holder), so that a later
task of the run can find and end them.
"""

from __future__ import annotations

import difflib
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowRuntimeError, AirflowSkipException, AirflowTaskTimeout

from shoal.airflow._holder import ENGINE, run_of
from shoal.airflow.assets import PROMOTIONS
from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.base.waiting import (
    WaitingOperator,
    WorkerLostError,
    deadline_of_operation,
    end_if_worker_is_lost,
)
from shoal.airflow.block_checks import check_block
from shoal.airflow.checks import (
    UNKNOWN,
    Arguments,
    check_nodes,
    check_paths,
    check_pool,
    check_waits,
    is_known,
    node_count,
    pool_of,
)
from shoal.airflow.hooks import database_url
from shoal.airflow.links import LINKS, links_of
from shoal.airflow.outcomes import record_failure, record_success
from shoal.airflow.results import CAUSE
from shoal.airflow.retries import no_retry_of_permanent_errors
from shoal.errors import InvalidArgumentError, ShoalError, shown
from shoal.jobs.specs.text import SUFFIXES, fields_of
from shoal.pool.spec import PoolSpec, ScaleOptions, is_uri
from shoal.training.pytorch.train_func import TrainFunc, check_train_func

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec, JobHandle, JobResult, Message, TaskTry
    from shoal.pool.api import ComputePool
    from shoal.pool.status import PoolStatus


_ENDED = ("success", "failed")

_PREDICTION = ("model", "dataset", "output_path")
"""Fields of a prediction's spec that are arguments of the operator."""

_JOB_ID = "shoal_job_id"
"""Key of the id of the task's job in Airflow's task state."""

_LOOK_S = 0.2
"""Seconds between two checks whether Airflow has killed the task. A killed task has only 5 s to end."""


class ScaleClusterOperator(WaitingOperator):
    """Operator that sets a pool's base demand: the number of nodes that the pool keeps until the demand is set again.

    To get nodes only for the duration of a DAG run, use ``pool_for_run``.

    :param expected_cluster_size: Number of nodes, including the head node. (templated)
    :param is_async: Return when the request is accepted, before the nodes are ready. A ``NodesSensor`` can then wait
        for the nodes.
    :param options: Dict that may contain ``rollback_after_seconds`` (time until the deadline; default: 720) and
        ``block_until_min_cluster_size`` (number of ready nodes with which the task may end). (templated)
    :param pool_name: Name or URI of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param deferrable: Whether the task waits in Airflow's triggerer, without a worker (see `WaitingOperator`).
    :param poll_interval: Seconds between two looks at the pool while the task is deferred.
    :param wait_for_completion: False means the same as `is_async`.
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "expected_cluster_size", "options")

    def __init__(
        self,
        *,
        expected_cluster_size: int,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.expected_cluster_size = expected_cluster_size
        # The attribute is not called `is_async`, because Airflow's operators have an attribute of this name with
        # another meaning.
        self.returns_at_once = is_async or not self.wait_for_completion
        self.options = options
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known: the pool, the number of nodes, the options and how the task waits."""
        check_nodes(arguments, "expected_cluster_size", check_pool(arguments))
        check_waits(arguments)

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> bool:
        """Set the number of nodes that the pool keeps, and wait until they are ready. If Airflow kills the task during
        the wait, restore the previous number."""
        pool = self.hook.pool(self.holder_in(context))
        pool.scale(
            node_count(self.expected_cluster_size, "expected_cluster_size"),
            is_async=self.returns_at_once or self.deferrable,
            options=self.options,
            on_progress=self.look,
        )
        if self.deferrable and not self.returns_at_once:
            _defer_to_nodes(self, pool, self.options)
        return True

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        """Continue after the deferral: return when the nodes are ready, or raise the error of the request."""
        _finish_request(self, self.hook.pool(self.holder_in(context)), event, request, self.look)
        return True


class LeasePoolOperator(WaitingOperator):
    """Operator that leases nodes for the DAG run: the setup task of ``pool_for_run``.

    If the pool is down and a connection or URI defines it, the lease brings the pool up. The pool then goes down when
    its last lease is released.

    :param size: Number of nodes, including the head node. (templated)
    :param exclusive: Add these nodes to those of all other leases. If they do not fit into MAX_NODES, the task waits in
        the pool's queue, at most until the deadline (``rollback_after_seconds``). By default, all runs share the nodes
        of the largest lease.
    :param is_async: Return when the lease is accepted, before the nodes are ready. A ``NodesSensor`` can then wait for
        the nodes.
    :param options: The same options as for ``ScaleClusterOperator``. (templated)
    :param pool_name: Name or URI of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param deferrable: Whether the task waits in Airflow's triggerer, without a worker (see `WaitingOperator`).
    :param poll_interval: Seconds between two looks at the pool while the task is deferred.
    :param wait_for_completion: False means the same as `is_async`.
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "size", "options")

    def __init__(
        self,
        *,
        size: int,
        exclusive: bool = False,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size = size
        self.exclusive = exclusive
        self.returns_at_once = is_async or not self.wait_for_completion
        self.options = options
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known: the pool, the number of nodes, the options and how the task waits."""
        check_nodes(arguments, "size", check_pool(arguments))
        check_waits(arguments)

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> str:
        """Lease the nodes, and return the pool's name.

        Wrong arguments of the block's tasks fail the task before the nodes are requested (see `check_block`). If the
        task is killed while it waits for the nodes, the lease is released.
        """
        check_block(self, context)
        hook = self.hook
        pool = hook.pool(self.holder_in(context))
        pool.lease(
            node_count(self.size, "size"),
            exclusive=self.exclusive,
            bring_up=hook.spec is not None,
            is_async=self.returns_at_once or self.deferrable,
            options=self.options,
            on_progress=partial(self.look, holder=pool.holder),
        )
        if self.deferrable and not self.returns_at_once:
            _defer_to_nodes(self, pool, self.options)
        return pool.name

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], request: Mapping[str, Any]) -> str:
        """Continue after the deferral: return when the nodes are ready, or raise the error of the request."""
        pool = self.hook.pool(self.holder_in(context))
        _finish_request(self, pool, event, request, partial(self.look, holder=pool.holder))
        return pool.name


def _defer_to_nodes(operator: WaitingOperator, pool: ComputePool, options: Mapping[str, Any] | None) -> None:
    """Defer a task until the request that it has just made has ended, or has enough nodes.

    :param operator: The task's operator.
    :param pool: The pool, with which the request was made.
    :param options: Options of the request.
    :raises TaskKilledError: Airflow has ended the task. The request is rolled back.
    """
    from shoal.airflow.triggers.pools import PoolTrigger

    assert pool.operation_id is not None
    # Airflow does not defer a task that it ends.
    if operator.is_killed:
        pool.withdraw(pool.operation_id, f"task {operator.task_id} was ended")
        operator.end_if_killed()
    checked = ScaleOptions.parse(options or {})
    request = {
        "operation_id": pool.operation_id,
        "block_until_min_cluster_size": checked.block_until_min_cluster_size,
    }
    deadline, limit = deadline_of_operation(checked.rollback_after_seconds), operator.execution_timeout
    if limit is not None:
        deadline = min(deadline, time.time() + limit.total_seconds())
    trigger = PoolTrigger(
        pool=pool.name,
        holder=pool.holder,
        nodes=checked.block_until_min_cluster_size,
        operation_id=pool.operation_id,
        poll_interval=operator.poll_interval,
        deadline=deadline,
    )
    operator.defer(trigger=trigger, method_name="execute_complete", kwargs={"request": request})


def _finish_request(
    operator: WaitingOperator,
    pool: ComputePool,
    event: Mapping[str, Any],
    request: Mapping[str, Any],
    on_progress: Callable[[PoolStatus], None],
) -> None:
    """Continue after the deferral: return when the nodes are ready, or raise the error of the request.

    :param operator: The task's operator.
    :param pool: The pool.
    :param event: Event of the trigger.
    :param request: The request, as `_defer_to_nodes` has described it.
    :param on_progress: Called with the pool's status while the task waits.
    :raises AirflowTaskTimeout: The task has exceeded its `execution_timeout`. The request is rolled back.
    """
    limit = operator.execution_timeout
    if event["timed_out"] and limit is not None:
        reason = f"task {operator.task_id} was not done within its execution_timeout of {limit}"
        if pool.withdraw(request["operation_id"], reason):
            raise AirflowTaskTimeout(reason)
    pool.wait_for_operation(**request, on_progress=on_progress)


class _JobOperator(WaitingOperator):
    """Base class of operators that submit a job, copy its log to the task's log, and wait for its result.

    :param durable: Whether a retry attaches to the job of an earlier try that has not ended, and takes the result of
        one that has succeeded meanwhile. False: a retry ends such a job and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when Airflow ends the task: a user clears or marks it, or it
        times out. False: the job goes on until a try of the task attaches to it, or the teardown ends it.
    """

    operator_extra_links = LINKS

    def __init__(self, *, durable: bool = True, cancel_on_kill: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.durable = durable
        self.cancel_on_kill = cancel_on_kill
        self.links: dict[str, str] = {}

    def prepare_template(self) -> None:
        """Warn if no task of the DAG leases nodes of this task's pool (see `missing_lease`). Airflow calls this when
        the DAG is complete."""
        if (message := missing_lease(self)) is not None:
            warnings.warn(message, stacklevel=2)

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
        handle = submit(
            spec,
            holder=self.holder_in(context),
            key=task.key,
            task=task,
            detached=not self.wait_for_completion,
            connection_url=database_url,
        )
        self.log.info("job %s, attempt %d, on pool %s", handle.job_id, handle.attempt, handle.pool)
        self._show_job_id(handle, context)
        return handle

    def run_job(self, spec: AnyJobSpec, context: Context) -> JobResult:
        """Submit the job, or attach to the job of an earlier try of this task, and return the job's result.

        If the task is deferrable, this defers it until the job has ended. Then Airflow calls `execute_complete`.

        :param spec: Spec of the job.
        :param context: Airflow's context of the task.
        """
        handle = self.submit_job(spec, context)
        # Airflow does not defer a task that it ends. So a killed task waits here, where it ends its job.
        if self.deferrable and not self.is_killed and not handle.has_ended:
            self._defer_to(handle, context)
        return self._wait_for(handle)

    def resume_job(self, event: Mapping[str, Any], job: Mapping[str, Any]) -> tuple[AnyJobSpec, JobResult]:
        """Continue after the deferral: return the spec and the result of the job.

        :param event: Event of the trigger.
        :param job: The job, as `_defer_to` has described it.
        :raises AirflowTaskTimeout: The task has exceeded its `execution_timeout`. Its job is cancelled.
        """
        from shoal.jobs import attach

        handle = attach(job["job_id"], job["attempt"], submissions=job["submissions"])
        if event["timed_out"] and not handle.has_ended:
            reason = f"task {self.task_id} was not done within its execution_timeout of {self.execution_timeout}"
            self._cancel(handle, reason)
            raise AirflowTaskTimeout(reason)
        return handle.spec, self._wait_for(handle, event["log_position"])

    def _defer_to(self, handle: JobHandle, context: Context) -> None:
        from shoal.airflow.triggers.jobs import JobTrigger

        job: dict[str, Any] = {"job_id": handle.job_id, "attempt": handle.attempt, "submissions": handle.submissions}
        limit = self.execution_timeout
        trigger = JobTrigger(
            **job,
            task_try=context["ti"].try_number,
            cancel_on_kill=self.cancel_on_kill,
            poll_interval=self.poll_interval,
            deadline=None if limit is None else time.time() + limit.total_seconds(),
        )
        self.defer(trigger=trigger, method_name="execute_complete", kwargs={"job": job})

    def _wait_for(self, handle: JobHandle, log_position: int = 0) -> JobResult:
        # When Airflow ends a task, a signal raises an exception in the main thread. So the job is awaited in another
        # thread, where the exception cannot interrupt a transaction.
        stop = Event()
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(handle.wait, on_log=self.log.info, stop=stop, log_position=log_position)
            try:
                while not wait([result], timeout=_LOOK_S).done:
                    self.end_if_killed()
                    end_if_worker_is_lost()
            except WorkerLostError:
                stop.set()
                raise
            # The wait ends with an exception if Airflow kills the task, or if the task exceeds its execution_timeout.
            # The job is then cancelled, unless a newer try of the task has attached to it. There is such a try if
            # Airflow had lost this try's worker or scheduler for some time: Airflow then starts a new try first, and
            # kills this one later.
            except BaseException as end:
                try:
                    self._cancel(handle, str(end) or f"task {self.task_id} was ended")
                finally:
                    stop.set()
                raise
            self._set_links(handle, result.result())
            return result.result()

    def _set_links(self, handle: JobHandle, result: JobResult) -> None:
        from shoal.pool.api import ComputePool

        try:
            self.links = links_of(handle.spec, result, PoolSpec.parse(ComputePool(handle.pool).describe().uri))
        # The job has succeeded, so the task must not fail because of its links.
        except Exception:
            self.log.warning("the links of the task could not be found", exc_info=True)

    def _cancel(self, handle: JobHandle, reason: str) -> None:
        """Cancel the job of this try, unless a newer try has attached to it, or the user has opted out."""
        if not self.cancel_on_kill:
            self.log.info("job %s goes on (cancel_on_kill=False)", handle.job_id)
        elif not handle.cancel(reason, unless_resubmitted=True):
            self.log.info("job %s had ended, or belongs to a newer try of the task", handle.job_id)

    def _task_try(self, context: Context) -> TaskTry:
        """Return which try of the task runs now, and after which try the task was cleared, if it was."""
        from shoal.jobs import TaskTry

        ti = context["ti"]
        # Airflow adds the number of tries before a clear to `max_tries`, which is `retries` at first.
        cleared = ti.max_tries - (self.retries or 0)
        # If `retries` of the DAG was changed after the run began, the difference is not the number of a try.
        is_a_try = 0 < cleared < ti.try_number
        return TaskTry(f"{ti.task_id}/{ti.map_index}", ti.try_number, cleared if is_a_try else 0, durable=self.durable)

    def _show_job_id(self, handle: JobHandle, context: Context) -> None:
        """Store the job's id in the task's state of Airflow 3.3, which shows it in the UI. It is never read."""
        state = context.get("task_state_store")
        if state is None:
            return
        try:
            state.set(_JOB_ID, handle.job_id)
        # The job runs, so the task must not fail because its id cannot be shown.
        except Exception:
            self.log.warning("the job's id could not be stored in the task's state", exc_info=True)


def _submitted(handle: JobHandle) -> dict[str, Any]:
    return {"job_id": handle.job_id, "attempt": handle.attempt, "pool": handle.pool}


def is_job(task: BaseOperator | MappedOperator) -> bool:
    """Return whether a task, mapped or not, submits a job."""
    return issubclass(task.operator_class if isinstance(task, MappedOperator) else type(task), _JobOperator)


def missing_lease(task: BaseOperator | MappedOperator) -> str | None:
    """Return what is wrong if no task of the DAG leases nodes of the pool on which a task runs its job, else None.

    A pool that is always up needs no lease. So nothing is wrong if the task has only the name of a pool, and is in no
    block of `pool_for_run`.

    :param task: Task of a complete DAG that submits a job.
    """
    arguments = task.partial_kwargs if isinstance(task, MappedOperator) else vars(task)
    name, dag = arguments.get("pool_name"), task.get_dag()
    if dag is None or not isinstance(name, str) or not (arguments.get("lease") or is_uri(name)):
        return None
    claims = [one for one in dag.tasks if isinstance(one, LeasePoolOperator | ScaleClusterOperator)]
    # Without the name of a pool, it is not known yet which pool a task leases.
    if not all(isinstance(other, str) and is_known(other) for other in [name, *(one.pool_name for one in claims)]):
        return None
    pool, leased = pool_of(arguments), [pool_of(vars(claim)) or "" for claim in claims]
    if pool is None or pool in leased:
        return None
    near = difflib.get_close_matches(pool, leased, n=1)
    return f"task {task.task_id} runs on the pool {pool}, but no task of the DAG leases nodes of it: " + (
        f"did you mean {near[0]}?"
        if near
        else "use pool_for_run, or, if the pool is always up, only its name as pool_name"
    )


class DistributedTrainOperator(_JobOperator):
    """Operator that trains on a pool: it submits a job, streams the job's log, and returns the job's result as a dict.

    The job's holder is the DAG run, and the job belongs to this task. When Airflow retries the task, the new try
    attaches to the job if the job still runs, takes the result if the job has succeeded in the meantime, and otherwise
    starts a new attempt. This does not depend on the values of templates in `spec`, which may differ in each try. If
    the task is marked or cleared, or times out, its job is cancelled. A cleared task trains anew.

    If the job registers a boosting model, and its rows, holdout and settings are those of the newest registered
    version, then nothing is trained, and Airflow marks the task as skipped. A first run, and a run after a failed one,
    always train.

    If the job promotes its model, the task adds an event of the model's asset, on which other DAGs can be scheduled
    (see `shoal.airflow.assets`).

    :param spec: A `JobSpec`, a `FunctionJobSpec`, the fields of one of them as a dict, or the path of a JSON or YAML
        file (``.json``, ``.yaml``, ``.yml``) with these fields, absolute or relative to the DAG file's folder and
        ``template_searchpath``. With `train_func`, the remaining fields, such as ``hyper_params``, ``dataset_map``,
        ``scaling_config``, ``register``. Paths in a spec must be absolute or URIs. (templated, also in a file)
    :param framework: Library that trains the model. Needed only if `spec` does not contain the field ``framework``.
    :param train_func: Function that runs in every worker. Pass the function itself (which is pickled with its code),
        its name as ``pkg.module:name``, or the path of a script.
    :param op_args: Positional arguments of the function, or command line arguments of the script. (templated)
    :param op_kwargs: Keyword arguments of the function. (templated)
    :param skip_if_unchanged: Whether a training without new rows is skipped, as described above. False: the task always
        trains. By default, the field ``register.skip_if_unchanged`` of `spec` decides, and the training is skipped if
        `spec` does not contain this field. A training function is never skipped. (templated)
    :param pool_name: Name or URI of the pool. By default, the pool that `spec` names. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param durable: Whether a retry attaches to the job of an earlier try, as described above. False: a retry ends the
        job of an earlier try and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when the task is marked or cleared, or times out.
    :param deferrable: Whether the task waits in Airflow's triggerer, without a worker (see `WaitingOperator`).
    :param poll_interval: Seconds between two looks at the job while the task is deferred.
    :param wait_for_completion: False: the task submits the job, and returns a dict with ``job_id``, ``attempt`` and
        ``pool``. No process needs to wait for the job then.
    """

    template_fields: Sequence[str] = (
        *PoolOperator.template_fields,
        "spec",
        "op_args",
        "op_kwargs",
        "skip_if_unchanged",
    )
    template_fields_renderers = {"spec": "json", "op_args": "py", "op_kwargs": "py"}  # noqa: RUF012 - Airflow's own shape
    shallow_copy_attrs: Sequence[str] = ("train_func",)

    def __init__(
        self,
        *,
        spec: AnyJobSpec | Mapping[str, Any] | XComArg | str | None = None,
        framework: str | None = None,
        train_func: TrainFunc | None = None,
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        skip_if_unchanged: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outlets = [*self.outlets, PROMOTIONS]
        self.spec = spec
        self.framework = framework
        self.train_func = train_func
        self.op_args: Collection[Any] = op_args or []
        self.op_kwargs: Mapping[str, Any] = op_kwargs or {}
        self.skip_if_unchanged = skip_if_unchanged
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known: the pool, and what to train and how."""
        super().check_arguments(arguments)
        train_func = arguments["train_func"]
        # Without the function, it is not known which fields the spec must have.
        if train_func is UNKNOWN:
            return
        spec = arguments["spec"]
        # A file is read, and the spec in it checked, when the DAG is complete: see `prepare_template`.
        if _is_spec_file(spec):
            spec = UNKNOWN
        # Of a dict with templates, the other fields are checked.
        given = spec if isinstance(spec, Mapping) or is_known(spec) else None
        args, kwargs, framework = (arguments.get(name) for name in ("op_args", "op_kwargs", "framework"))
        check_train_func(train_func, args, kwargs, framework=framework, fields=given)
        check_paths(given, train_func)
        if spec is not None and given is None:
            return
        from shoal.jobs.task_spec import check_spec, skipping_if_unchanged

        checked = check_spec(
            given,
            is_known,
            framework=framework,
            train_func=train_func,
            args=args if isinstance(args, list | tuple) else (),
            kwargs=kwargs if isinstance(kwargs, Mapping) else {},
        )
        if checked is not None and is_known(arguments["skip_if_unchanged"]):
            skipping_if_unchanged(checked, arguments["skip_if_unchanged"])

    def prepare_template(self) -> None:
        """Read the spec if it is in a file, and check it. Airflow calls this when the DAG is complete, before it
        renders templates."""
        super().prepare_template()
        if is_known(self.spec) and _is_spec_file(self.spec):
            self.spec = _spec_in_file(self, cast("str", self.spec))
            self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> Any:
        """Submit the job, or attach to the job of an earlier try, wait until the job ends, and return its result as a
        dict."""
        if not self.wait_for_completion:
            with self._recording_failures(context):
                return _submitted(self.submit_job(self.job_spec(context), context))
        return self.value_of(self.train(context))

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], job: Mapping[str, Any]) -> Any:
        """Continue after the deferral: return the result of the job, or raise its error."""
        with self._recording_failures(context):
            spec, result = self.resume_job(event, job)
        return self.value_of(self._recorded(context, spec, result))

    def value_of(self, result: JobResult) -> Any:
        """Return the value that the task returns for a job's result.

        :param result: Result of the job.
        """
        return result.to_dict()

    def job_spec(self, context: Context) -> AnyJobSpec:
        """Build the job's spec from the operator's arguments.

        :param context: Airflow's context of the task.
        """
        from shoal.jobs import skipping_if_unchanged, spec_of

        # The file's name is a template, or an argument of a mapped task. So it was not known before.
        if _is_spec_file(self.spec):
            self.spec = self.render_template(_spec_in_file(self, cast("str", self.spec)), context)
        given = cast("AnyJobSpec | Mapping[str, Any] | None", self.spec)
        check_paths(given)
        spec = spec_of(
            given,
            framework=self.framework,
            train_func=self.train_func,
            args=tuple(self.op_args),
            kwargs=self.op_kwargs,
        )
        return skipping_if_unchanged(spec, self.skip_if_unchanged)

    def train(self, context: Context) -> JobResult:
        """Build the spec from the operator's arguments, run the job, and return the job's result.

        If the job has skipped its training, this raises AirflowSkipException.

        The outcome is stored as an XCom, from which messages are made (see `shoal.airflow.notifications`). If the job
        fails or is skipped, the cause is stored, too, so that a later task can report it (see `training_results`).

        :param context: Airflow's context of the task.
        """
        with self._recording_failures(context):
            spec = self.job_spec(context)
            result = self.run_job(spec, context)
        return self._recorded(context, spec, result)

    @contextmanager
    def _recording_failures(self, context: Context) -> Iterator[None]:
        """Store the cause as an XCom if the ``with`` block fails."""
        try:
            yield
        except ShoalError as error:
            record_failure(context, cast("AnyJobSpec | Mapping[str, Any] | None", self.spec), error)
            self._store_cause(context, str(error))
            raise

    def _recorded(self, context: Context, spec: AnyJobSpec, result: JobResult) -> JobResult:
        """Store the outcome as an XCom, and return the result; raise AirflowSkipException if nothing was trained."""
        record_success(context, spec, result)
        if result.skipped:
            self._store_cause(context, result.skipped)
            raise AirflowSkipException(result.skipped)
        return result

    def _store_cause(self, context: Context, cause: str) -> None:
        try:
            context["ti"].xcom_push(key=CAUSE, value=cause)
        # If the cause of a failure or a skip cannot be stored, the task must still end as failed or skipped.
        except Exception:
            self.log.warning("the cause could not be stored as an XCom", exc_info=True)


def _is_spec_file(spec: Any) -> bool:
    """Return whether the argument `spec` is the path of a file with a spec."""
    return isinstance(spec, str) and spec.endswith(SUFFIXES)


def _spec_in_file(task: BaseOperator, path: str) -> dict[str, Any]:
    """Read the fields of a spec from a file.

    :param task: Task whose DAG determines the folders in which a relative path is looked up.
    :param path: Path of the file.
    """
    from jinja2 import TemplateNotFound

    environment = task.get_template_env()
    try:
        if os.path.isabs(path) or environment.loader is None:
            text = Path(path).read_text()
        else:
            text, _, _ = environment.loader.get_source(environment, path)
    except (OSError, ValueError, TemplateNotFound) as error:
        raise InvalidArgumentError(
            f"spec={path!r} cannot be read: {error}; a relative path is looked up in the DAG file's folder and in "
            "template_searchpath"
        ) from None
    return fields_of(text, f'the spec "{path}"', path)


class BatchPredictOperator(_JobOperator):
    """Operator that computes a model's predictions for the rows of a dataset on a pool, and writes them as Parquet.

    The prediction is a job that belongs to this task. A retry of the task attaches to the job if the job still runs. If
    `output_path` already contains the same predictions, the job does nothing. The operator returns the job's result as
    a dict with ``rows``, ``output_path`` and ``model_uri``, which contains the version of the model.

    :param model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
        (templated)
    :param dataset: A `DataConnector`, or its spec as a dict, such as ``{"paths": ["/data/{{ ds }}"]}``. (templated)
    :param output_path: Directory or URI to which the predictions are written. (templated)
    :param spec: Further fields of a `PredictJobSpec`, such as ``keep_cols``, ``overwrite``, ``scaling_config``.
        (templated)
    :param pool_name: Name or URI of the pool. By default, the pool that `spec` names. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param durable: Whether a retry attaches to the job of an earlier try, as described above. False: a retry ends the
        job of an earlier try and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when the task is marked or cleared, or times out.
    :param deferrable: Whether the task waits in Airflow's triggerer, without a worker (see `WaitingOperator`).
    :param poll_interval: Seconds between two looks at the job while the task is deferred.
    :param wait_for_completion: False: the task submits the job, and returns a dict with ``job_id``, ``attempt`` and
        ``pool``. No process needs to wait for the job then.
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "model", "dataset", "output_path", "spec")
    template_fields_renderers = {"dataset": "json", "spec": "json"}  # noqa: RUF012 - Airflow's own shape

    def __init__(
        self,
        *,
        model: str,
        dataset: Any,
        output_path: str,
        spec: Mapping[str, Any] | XComArg | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.dataset = dataset
        self.output_path = output_path
        self.spec = spec
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known: the pool, the model, the dataset and the output."""
        super().check_arguments(arguments)
        spec = arguments["spec"] or {}
        fields = {**(spec if isinstance(spec, Mapping) else {}), **{name: arguments[name] for name in _PREDICTION}}
        check_paths(fields)
        if isinstance(spec, Mapping):
            from shoal.jobs import PredictJobSpec

            PredictJobSpec.check(fields, is_known)
        elif is_known(spec):
            raise InvalidArgumentError(f"spec={shown(spec)}: it has to be a dict of further fields of a PredictJobSpec")

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Submit the job, or attach to the job of an earlier try, wait until the job ends, and return its result as a
        dict."""
        from shoal.jobs import PredictJobSpec

        check_paths(self._fields())
        spec = PredictJobSpec.parse(self._fields())
        if not self.wait_for_completion:
            return _submitted(self.submit_job(spec, context))
        return self.run_job(spec, context).to_dict()

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
        """Continue after the deferral: return the result of the job as a dict, or raise the job's error."""
        return self.resume_job(event, job)[1].to_dict()

    def _fields(self) -> dict[str, Any]:
        given = cast("Mapping[str, Any] | None", self.spec)
        return {**(given or {}), **{name: getattr(self, name) for name in _PREDICTION}}


class CleanupPoolOperator(PoolOperator):
    """Operator that cleans up after a DAG run on a pool: the teardown task of ``pool_for_run``.

    The operator cancels the run's jobs and releases the run's lease. Then it sweeps this host: it ends nodes that no
    demand needs, and records the end of lost jobs.

    :param holder: Name of the holder whose jobs and lease are ended: ``airflow:<dag_id>/<run_id>``. By default, the
        holder of this DAG run. (templated)
    :param pool_name: Name or URI of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "holder")

    def __init__(self, *, holder: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holder = holder
        self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up after the DAG run, and return a report as a dict (see `shoal.jobs.clean_up`). A second run does no
        harm."""
        from shoal.jobs import clean_up

        report = clean_up(self.hook.pool().name, self.holder or self.holder_in(context))
        self.log.info("cancelled %s, lease released: %s", list(report.cancelled) or "nothing", report.released)
        for line in (*report.swept, *report.left):
            self.log.info(line)
        return report.to_dict()


class SweepPoolsOperator(BaseOperator):
    """Operator that cleans up after ended DAG runs, on every pool of this host. Use it in a DAG that runs periodically.

    The operator cancels the jobs and releases the leases of DAG runs that have ended. Then it sweeps this host: it ends
    nodes that no demand needs, and records the end of lost jobs. A run that this Airflow does not know may belong to
    another Airflow. So its jobs and leases are not changed; the leases expire when they are no longer renewed.
    """

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> list[str]:
        """Clean up after ended DAG runs, and return a list with one sentence for each action."""
        from shoal.jobs.cleanup import clean_up_ended_runs, sweep

        def why_ended(run: str) -> str | None:
            dag_id, slash, run_id = run_of(run).partition("/")
            # A holder name that `holder_of` has made always contains a slash. A holder name without a slash was chosen
            # by a user, and belongs to no DAG run.
            if not slash:
                return None
            try:
                state = context["ti"].get_dagrun_state(dag_id, run_id)
            except AirflowRuntimeError:
                return None
            return f"its DAG run ended as {state}" if state in _ENDED else None

        did = [*clean_up_ended_runs(ENGINE, why_ended), *sweep()]
        for line in did:
            self.log.info(line)
        return did


class ModelAlertError(AirflowFailException):
    """Raised by `CheckModelsOperator`: a model's last promotion is too long ago, or a job has waited too long.

    :param alerts: One sentence for each model and each job.
    """

    def __init__(self, alerts: Sequence[str]) -> None:
        super().__init__("; ".join(alerts))
        self.alerts = tuple(alerts)

    @property
    def message(self) -> Message:
        """Return the alerts as a message for users, with one line for each model or job that failed the check."""
        from shoal.jobs import Message

        count = len(self.alerts)
        return Message(self.alerts[0] if count == 1 else f"{count} alerts about models", "\n".join(self.alerts))


class CheckModelsOperator(BaseOperator):
    """Operator that fails if a model's last promotion is too long ago, or if a job has waited too long in a queue.

    The error has one sentence for each such model and job. To be told, set ``on_failure_callback`` to
    ``model_message(notifier)`` from `shoal.airflow.notifications`. The task is not retried.

    :param promoted_within: Longest time since a model's last promotion. None: promotions are not checked.
    :param started_within: Longest time that a job may wait in the queue of its pool. None: jobs are not checked.
    :param models: Names of the models to check; a model that was never trained fails the check, too. By default, all
        models that shoal's store knows.
    """

    def __init__(
        self,
        *,
        promoted_within: timedelta | None = None,
        started_within: timedelta | None = None,
        models: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if promoted_within is None and started_within is None:
            raise InvalidArgumentError(
                f"task {self.task_id} has nothing to check: give promoted_within, started_within or both"
            )
        self.promoted_within = promoted_within
        self.started_within = started_within
        self.models = models

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> None:
        """Raise `ModelAlertError` if a model's last promotion is too long ago, or a job has waited too long."""
        from shoal.jobs import stale_models, waiting_jobs

        alerts: list[object] = []
        if self.promoted_within is not None:
            alerts += stale_models(self.promoted_within, self.models)
        if self.started_within is not None:
            alerts += waiting_jobs(self.started_within)
        if alerts:
            raise ModelAlertError([str(alert) for alert in alerts])
