"""Operators that scale pools, lease nodes, and clean up.

The setup task of a ``with pool_for_run(...)`` block checks the arguments of the block's tasks before it requests nodes.
It can render those templates that have the same value in all tasks of a DAG run, and read results of earlier tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseOperator, TriggerRule, XComArg
from airflow.sdk.exceptions import AirflowFailException, AirflowRuntimeError, AirflowTaskTimeout

from shoal.airflow.deployment import ENGINE, deployment_of_task, is_single_task_test, other_addresses, team_of
from shoal.airflow.hooks import database_url
from shoal.airflow.operators import base
from shoal.airflow.results import no_retry_of_permanent_errors
from shoal.errors import InvalidArgumentError
from shoal.pool.holder import DagRunHolder, acting_for
from shoal.pool.spec import AUTO, LeaseOptions, ScaleOptions, is_auto, is_uri

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context
    from airflow.sdk.definitions.mappedoperator import MappedOperator

    from shoal.jobs import AnyJobSpec
    from shoal.pool.api import ComputePool
    from shoal.pool.waiting import OnProgress


OF_THE_RUN = frozenset(
    {
        "conn",
        "dag",
        "dag_run",
        "data_interval_end",
        "data_interval_start",
        "ds",
        "ds_nodash",
        "logical_date",
        "macros",
        "params",
        "prev_data_interval_end_success",
        "prev_data_interval_start_success",
        "prev_end_date_success",
        "prev_start_date_success",
        "run_id",
        "triggering_asset_events",
        "ts",
        "ts_nodash",
        "ts_nodash_with_tz",
        "var",
    }
)
"""Names that templates can use, and that have the same value in all tasks of a DAG run."""


_MAY_NEVER_RUN = frozenset({TriggerRule.ONE_FAILED, TriggerRule.ALL_FAILED, TriggerRule.ALL_SKIPPED})
"""Trigger rules of tasks that run only if other tasks have failed or were skipped."""


def check_block(setup: BaseOperator, context: Context) -> None:
    """Check the arguments of the tasks in the setup task's ``with pool_for_run(...)`` block, as far as the arguments
    are known when the setup task runs.

    Two kinds of tasks are checked only when they run: tasks that other tasks may skip, and mapped tasks, because a
    wrong instance of a mapped task does not stop the other instances.

    :param setup: The setup task. The tasks of its block have the setup's task id as their argument `lease`.
    :raises InvalidArgumentError: An argument of a task is wrong.
    :raises AirflowFailException: The same in an Airflow task, or a connection in a spec does not exist.
    """
    from shoal.jobs.credentials import connections

    dag = setup.get_dag()
    for task in dag.tasks if dag else ():
        is_inside = getattr(task, "lease", None) == setup.task_id
        if isinstance(task, base.CheckedOperator) and is_inside and _will_run(task, setup):
            rendered = {name: _rendered(getattr(task, name), task, setup, context) for name in task.template_fields}
            task.check(task.task_id, {**vars(task), **rendered})
            # Only in a task are Airflow's secrets backends asked for database connections.
            if base.is_in_task():
                named = base.named_connections([rendered.get("spec"), rendered.get("dataset")])
                try:
                    connections(named, os.environ, database_url)
                except InvalidArgumentError as error:
                    raise AirflowFailException(f"task {task.task_id}: {error}") from error


def _will_run(task: BaseOperator, setup: BaseOperator) -> bool:
    """Return whether a task of a ``with pool_for_run(...)`` block certainly runs if no other task fails."""
    before = setup.get_flat_relative_ids(upstream=True)
    between = (one for one in task.get_flat_relatives(upstream=True) if one.task_id not in before)
    # Operators that are not from shoal, such as a branch, may skip the tasks after them.
    return TriggerRule(task.trigger_rule) not in _MAY_NEVER_RUN and all(
        isinstance(one, base.CheckedOperator) for one in between
    )


def _rendered(value: Any, task: BaseOperator, setup: BaseOperator, context: Context) -> Any:
    """Render the value of a template field in the same way as Airflow does later, when the task runs. Parts that are
    not known yet stay unrendered."""
    if isinstance(value, Mapping):
        return {name: _rendered(item, task, setup, context) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rendered(item, task, setup, context) for item in value]
    if base.is_known(value):
        return value
    try:
        if isinstance(value, str) and _depends_on_the_run_only(value, task, setup):
            return task.render_template(value, context)
        if isinstance(value, XComArg) and _has_ended(value, setup):
            found = value.resolve(context)
            return value if found is None else found
    # The error is only logged here: the task raises it when the task runs.
    except Exception:
        task.log.debug("a value of task %s cannot be rendered yet", task.task_id, exc_info=True)
    return value


def _depends_on_the_run_only(template: str, task: BaseOperator, setup: BaseOperator) -> bool:
    from jinja2 import meta

    environment = task.get_template_env()
    names = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
    return names <= OF_THE_RUN and ("params" not in names or task.params == setup.params)


def _has_ended(value: XComArg, setup: BaseOperator) -> bool:
    """Return whether `value` refers only to tasks that are unmapped and end before `setup` starts."""
    before = setup.get_flat_relative_ids(upstream=True)
    return all(task.task_id in before and not task.is_mapped for task, _ in value.iter_references())


_OPERATION_GRACE_S = 60.0
"""Seconds after the deadline of a request for nodes, after which a deferred task continues even if the request is still
open. Normally the reconciler on the pool's host ends a request at its deadline."""


class _NodesOperator(base.WaitingOperator):
    """Base class of operators that request nodes of a pool, and wait until the nodes are ready.

    :param options: Options of the request. (templated)
    :param plan_for: Spec of a boosting training, or its fields, if the number of nodes is "auto": the smallest number
        is planned on which the training fits into the memory. All tries of the task use the same number, until the task
        is cleared or the argument is changed in the DAG file. (templated)
    :param is_async: True has the effect of ``wait_for_completion=False``. `shoal.scale_cluster` and `pool_for_run` have
        an argument `is_async`, too.
    """

    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, "options", "plan_for")
    template_fields_renderers = {"options": "json", "plan_for": "json"}  # noqa: RUF012 - Airflow's own shape
    size_argument: str
    """Name of the argument with the number of nodes."""
    options_type: type[ScaleOptions] = ScaleOptions

    def __init__(
        self,
        *,
        options: Mapping[str, Any] | None,
        plan_for: AnyJobSpec | Mapping[str, Any] | XComArg | None = None,
        is_async: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.options = options
        self.plan_for = plan_for
        # Check the two arguments before they are combined: ``"no" and not False`` is True, which would hide the wrong
        # value "no".
        self.check(self.task_id, {"wait_for_completion": self.wait_for_completion, "is_async": is_async})
        self.wait_for_completion = self.wait_for_completion and not is_async

    @classmethod
    def check_arguments(cls, arguments: base.Arguments) -> None:
        """Check arguments that are known at parse time: pool, number of nodes, options and how the task waits."""
        super().check_arguments(arguments)
        size, plan_for = arguments[cls.size_argument], arguments["plan_for"]
        # A mapped task may get one of the two arguments later.
        if base.is_known(size) and plan_for is not base.UNKNOWN:
            is_auto(size, plan_for, cls.size_argument)
        if size == AUTO:
            if isinstance(plan_for, Mapping) or base.is_known(plan_for):
                from shoal.kinds.task_spec import check_spec

                base.check_paths(plan_for)
                check_spec(plan_for, base.is_known, pool=base.job_pool(arguments))
            arguments = base.Arguments({**arguments, cls.size_argument: base.UNKNOWN})
        base.check_nodes(arguments, cls.size_argument, base.check_pool(arguments), cls.options_type)

    def _size(self, pool: ComputePool, context: Context) -> dict[str, Any]:
        """Return the arguments of a request with the number of nodes, or with the function that plans it."""
        size = getattr(self, self.size_argument)
        if not is_auto(size, self.plan_for, self.size_argument):
            return {self.size_argument: base.node_count(size, self.size_argument)}
        from shoal.kinds.plan.call import planned_size

        plan_for = cast("AnyJobSpec | Mapping[str, Any]", self.plan_for)
        base.check_paths(plan_for)
        submission = self.submission(context, self.hook, digest=base.digest_as_written(self))
        planner = partial(planned_size, pool, plan_for, self.log.info, **submission)
        return {self.size_argument: size, "plan_for": planner}

    def _defer_to_nodes(self, pool: ComputePool) -> None:
        """Defer the task until enough of the requested nodes are ready, or until the request has ended.

        :raises TaskKilledError: Airflow has ended the task. The request is rolled back.
        """
        assert pool.operation_id is not None
        # A killed task cannot be deferred. So the request for nodes is rolled back here.
        if self.is_killed:
            pool.withdraw(pool.operation_id, f"task {self.task_id} was ended")
            self.end_if_killed()
        checked = LeaseOptions.parse(self.options or {})
        deadline, limit = time.time() + checked.rollback_after_seconds + _OPERATION_GRACE_S, self.execution_timeout
        if limit is not None:
            deadline = min(deadline, time.time() + limit.total_seconds())
        request = {"operation_id": pool.operation_id}
        nodes = checked.block_until_min_cluster_size
        self._defer_to_pool(
            pool, deadline, {"request": request}, nodes=nodes, poll_interval=self.poll_interval, **request
        )

    def _finish_request(
        self, pool: ComputePool, event: Mapping[str, Any], request: Mapping[str, Any], on_progress: OnProgress
    ) -> None:
        """Continue the task after its deferral: return when the nodes are ready, or raise the error of the request.

        :param request: Arguments of `ComputePool.wait_for_operation` for the request, which `_defer_to_nodes` has
            stored.
        :raises AirflowTaskTimeout: The task has exceeded its `execution_timeout`. The request is rolled back.
        """
        limit = self.execution_timeout
        if event["timed_out"] and limit is not None:
            reason = f"task {self.task_id} was not done within its execution_timeout of {limit}"
            if pool.withdraw(request["operation_id"], reason):
                raise AirflowTaskTimeout(reason)
        pool.wait_for_operation(**request, on_progress=on_progress)


class ScaleClusterOperator(_NodesOperator):
    """Operator that sets a pool's base demand: the number of nodes that the pool keeps until the demand is set again.

    To get nodes only for the duration of a DAG run, use ``pool_for_run``.

    :param expected_cluster_size: Number of nodes, including the head node; or "auto", with `plan_for`. (templated)
    :param options: Dict that may contain ``rollback_after_seconds`` (time until the deadline; default: 720) and
        ``block_until_min_cluster_size`` (number of ready nodes that are enough for the task to end). (templated)
    """

    template_fields: Sequence[str] = (*_NodesOperator.template_fields, "expected_cluster_size")
    size_argument = "expected_cluster_size"

    def __init__(
        self, *, expected_cluster_size: int | str, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(options=options, **kwargs)
        self.expected_cluster_size = expected_cluster_size
        self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> bool:
        """Set the number of nodes that the pool keeps, and wait until these nodes are ready. If Airflow kills the task
        during the wait, restore the previous number."""
        pool = self.pool_in(context)
        pool.scale(
            **self._size(pool, context),
            is_async=self.deferrable or not self.wait_for_completion,
            options=self.options,
            on_progress=self.log_progress,
        )
        if self.deferrable and self.wait_for_completion:
            self._defer_to_nodes(pool)
        return True

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        """Continue the task after its deferral: return when the nodes are ready, or raise the error of the request."""
        self._finish_request(self.pool_in(context), event, request, self.log_progress)
        return True


class LeasePoolOperator(_NodesOperator):
    """Operator that leases nodes for the DAG run. ``pool_for_run`` uses this operator as its setup task.

    If the pool is down and is defined by a connection or URI, the lease brings the pool up. The pool then goes down
    when its last lease is released.

    :param size: Number of nodes, including the head node; or "auto", with `plan_for`: if the pool is down, one node is
        leased first, on which the size is planned. (templated)
    :param exclusive: Lease these nodes in addition to the nodes of all other leases. If all leases together would
        exceed MAX_NODES, the task waits in the pool's queue, at most until the deadline (``rollback_after_seconds``).
        By default, all runs share the nodes of the largest lease.
    :param options: Options of ``ScaleClusterOperator``, and two limits: ``max_lifetime`` (seconds after which the lease
        and its jobs are ended) and ``budget_node_hours`` (node-hours after which the run's lease and jobs are ended).
        (templated)
    """

    template_fields: Sequence[str] = (*_NodesOperator.template_fields, "size")
    size_argument = "size"
    options_type = LeaseOptions

    def __init__(
        self, *, size: int | str, exclusive: bool = False, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(options=options, **kwargs)
        self.size = size
        self.exclusive = exclusive
        self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> str:
        """Lease the nodes, and return the pool's name.

        Wrong arguments of the block's tasks fail the task before the nodes are requested (see `check_block`). If the
        task is killed while it waits for the nodes, the lease is released.
        """
        check_block(self, context)
        return self._lease(context)

    def _lease(self, context: Context) -> str:
        hook = self.hook
        pool = self.pool_in(context, hook)
        if hook.spec is not None and base.pool_that_is_up(pool.name) is None:
            # Airflow has rendered this task's own arguments, and the DAG has them as they are written.
            tasks = dag.task_dict if (dag := self.get_dag()) else {}
            own = base.pool_of(vars(tasks[self.task_id])) if tasks else None
            for task in tasks.values():
                if base.pool_of(base.arguments_of(task)) == own and (problem := outside_of_lease(task)) is not None:
                    raise InvalidArgumentError(problem)
        pool.lease(
            **self._size(pool, context),
            exclusive=self.exclusive,
            bring_up=hook.spec is not None,
            may_redefine=hook.is_defined_by_connection,
            is_async=self.deferrable or not self.wait_for_completion,
            options=self.options,
            on_progress=partial(self.log_progress, holder=pool.holder),
        )
        if self.deferrable and self.wait_for_completion:
            self._defer_to_nodes(pool)
        return self._leased(pool, context)

    def _leased(self, pool: ComputePool, context: Context) -> str:
        if is_single_task_test(context):
            self.log.info("`airflow tasks test` runs no teardown task: the lease is released now")
            pool.release()
        return pool.name

    @no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], request: Mapping[str, Any]) -> str:
        """Continue the task after its deferral: return when the nodes are ready, or raise the error of the request."""
        pool = self.pool_in(context)
        self._finish_request(pool, event, request, partial(self.log_progress, holder=pool.holder))
        # While a DAG is paused, its deferred tasks do not continue, and nothing renews their leases.
        return self._leased(pool, context) if pool.renew() else self._lease(context)


def outside_of_lease(task: BaseOperator | MappedOperator) -> str | None:
    """Return what is wrong if tasks of the DAG bring the pool of a task up and lease its nodes, but not for this task,
    which may run before the nodes are leased or after they are released; otherwise None.

    :param task: Task of a complete DAG.
    """
    dag, arguments = task.get_dag(), base.arguments_of(task)
    pool = base.pool_of(arguments)
    if dag is None or pool is None or arguments.get("lease") or base.is_a(task, _NodesOperator, CleanupPoolOperator):
        return None
    leases = [one for one in dag.tasks if isinstance(one, LeasePoolOperator) and base.pool_of(vars(one)) == pool]
    if not any(one.compute_pool_conn_id or is_uri(one.pool_name or "") for one in leases):
        return None
    before, after = (task.get_flat_relative_ids(upstream=upstream) for upstream in (True, False))
    ends = [one for one in dag.tasks if isinstance(one, CleanupPoolOperator) and base.pool_of(vars(one)) == pool]
    ended = {one.lease for one in ends if one.task_id not in after}
    if any(one.task_id in before and one.lease not in ended for one in leases):
        return None
    return (
        f"task {task.task_id} runs on the pool {pool}, but it may run before {leases[0].task_id} leases its nodes, or "
        "after they are released: put the task into the block of pool_for_run; if the pool is always up, pass only its "
        "name as pool_name to all these tasks"
    )


_ENDED = ("success", "failed")


class CleanupPoolOperator(base.PoolOperator):
    """Operator that cancels the jobs and releases the lease of a DAG run on a pool.

    ``pool_for_run`` uses this operator as its teardown task. After the release, the operator ends nodes on this host
    that no lease and no base demand needs, and records the end of lost jobs.

    :param holder: Name of the holder whose jobs and lease are ended:
        ``airflow:<deployment>:<dag_id>/<run_id>``. By default, the holder of this DAG run. The jobs and the lease of
        another run must not belong to another team. (templated)
    """

    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, "holder")

    def __init__(self, *, holder: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holder = holder
        self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up after the DAG run, and return a report as a dict (see `shoal.jobs.clean_up`). A repeated call,
        for example in a retry, does no harm."""
        from shoal.jobs import clean_up
        from shoal.jobs.journal.owners import require_for_run
        from shoal.state import Store

        hook, own = self.hook, self.holder_in(context)
        pool, holder = hook.pool().name, self.holder or own
        if DagRunHolder.of(holder) != DagRunHolder.of(own):
            with acting_for(team_of(context, hook.team, self.owner)):
                require_for_run(Store(), pool, holder)
        report = clean_up(pool, holder)
        self.log.info("cancelled jobs: %s; lease released: %s", list(report.cancelled) or "none", report.released)
        for line in (*report.swept, *report.left):
            self.log.info(line)
        return report.to_dict()


_DELETED = "deleted"


def _state_of_run(ti: Any, run: DagRunHolder) -> str | None:
    """Return the state of a DAG run: `_DELETED` if Airflow answers that there is no such run, and None if the state is
    not known."""
    from airflow.sdk.api.client import ServerResponseError

    try:
        return str(ti.get_dagrun_state(run.dag_id, run.run_id))
    except AirflowRuntimeError as error:
        detail = error.error.detail or {}
        status, answer = detail.get("status_code"), detail.get("detail")
    # In `dag.test()`, Airflow raises the error of its API client.
    except ServerResponseError as error:
        status, answer = error.response.status_code, error.response.json()
    # A status of 404 without this reason is not the answer to the question, but that of a proxy, for example.
    reason = answer.get("detail") if isinstance(answer, dict) else None
    is_deleted = status == HTTPStatus.NOT_FOUND and isinstance(reason, dict) and reason.get("reason") == "not_found"
    return _DELETED if is_deleted else None


class SweepPoolsOperator(BaseOperator):
    """Operator that cleans up after all ended DAG runs, on every pool of this host. Use this operator in a DAG that
    runs periodically.

    The operator cancels the jobs and releases the leases of DAG runs that have ended. Then the operator ends nodes on
    this host that no lease and no base demand needs, and records the end of lost jobs. A run that was
    deleted in Airflow counts as ended. The operator does not change the jobs and leases of other Airflow deployments.
    """

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> list[str]:
        """Clean up after ended DAG runs, and return a list with one sentence for each action."""
        from shoal.jobs.cleanup import RunEnd, clean_up_ended_runs, sweep

        own = deployment_of_task()
        has_copies = bool(other_addresses(own))

        def end_of(name: str) -> RunEnd | None:
            run = DagRunHolder.of(f"{ENGINE}:{name}")
            if run is None or run.deployment not in (own, None):
                return None
            state = _state_of_run(context["ti"], run)
            # A run that this Airflow does not know may belong to another Airflow if its name was made by an older
            # shoal, or if another Airflow has a copy of this one's database.
            if state is _DELETED and run.deployment == own and not has_copies:
                return RunEnd("its DAG run was deleted")
            return RunEnd(f"its DAG run ended as {state}") if state in _ENDED else None

        did = [*clean_up_ended_runs(ENGINE, end_of), *sweep()]
        for line in did:
            self.log.info(line)
        return did
