"""Provide `pool_for_run`, which leases nodes of a pool for the tasks of a DAG run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from airflow.sdk import DAG, BaseOperator, TriggerRule, XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import DuplicateTaskIdFound

from shoal import jobs
from shoal.airflow.deployment import ONLY_LEASE
from shoal.airflow.operators import CleanupPoolOperator, LeasePoolOperator
from shoal.airflow.operators.base import PoolOperator, arguments_of, check_slots, is_a, pool_of
from shoal.errors import InvalidArgumentError, shown

_TEARDOWN_ID = "clean_up_pool"

_OWN_ARGUMENTS = {
    "task_id": "use prefix= instead",
    "trigger_rule": "Airflow decides when a setup and a teardown run",
    "lease": "pool_for_run sets it",
}
"""Arguments of operators that `pool_for_run` rejects, each with the advice for the error message."""


Operator: TypeAlias = BaseOperator | MappedOperator

_RULES_OF_EARLY_STARTS = frozenset({TriggerRule.ONE_SUCCESS, TriggerRule.ONE_FAILED, TriggerRule.ONE_DONE})
"""Trigger rules with which a task starts as soon as one of its upstream tasks has ended."""

_RULES_REFUSED_AFTER_SETUP = _RULES_OF_EARLY_STARTS | {TriggerRule.ALL_FAILED, TriggerRule.ALL_SKIPPED}
"""Trigger rules that `pool_for_run` rejects for a task directly after the setup task. With such a rule, the task could
start before the setup task ends (``one_success``), or would never start, because the setup task succeeds
(``all_failed``)."""


@dataclass(frozen=True)
class PoolTasks:
    """The setup task and the teardown task that `pool_for_run` creates.

    Other tasks can be ordered relative to these tasks, as in ``prepare >> tasks.setup``."""

    setup: LeasePoolOperator
    """Task that brings the pool up and leases its nodes."""
    teardown: CleanupPoolOperator
    """Task that cancels the jobs of the block, releases its lease and sweeps the pool. The teardown task runs even if
    other tasks have failed."""


_open_blocks: ContextVar[tuple[PoolTasks, ...]] = ContextVar("_open_blocks", default=())
"""Setup and teardown tasks of the ``with pool_for_run(...)`` blocks that are open now, from the outermost to the
innermost."""


@contextmanager
def pool_for_run(
    *,
    size: int | str,
    plan_for: jobs.AnyJobSpec | Mapping[str, Any] | XComArg | None = None,
    pool_name: str | None = None,
    compute_pool_conn_id: str | None = None,
    is_async: bool = False,
    exclusive: bool = False,
    options: Mapping[str, Any] | None = None,
    credential_conn_ids: Sequence[str] = (),
    prefix: str | None = None,
    deferrable: bool | None = None,
    **task_kwargs: Any,
) -> Iterator[PoolTasks]:
    """Lease nodes in a setup task before the tasks of the ``with`` block, and release them in a teardown task.

    All tasks that the block creates start after the setup and end before the teardown: plain and mapped operators,
    decorated tasks, and the tasks of task groups. The teardown runs even if tasks of the block have failed. A task that
    the DAG file places before the setup or after the teardown keeps its place.

    A DAG may have several such blocks, for different pools or for the same pool, one after another, side by side or
    nested. Each block has its own lease, and its teardown cancels only the jobs of its own tasks.

    :param size: Number of nodes, including the head node; or "auto", with `plan_for`.
    :param plan_for: Spec of a boosting training, or its fields, for the size "auto": the setup task leases the smallest
        number of nodes on which the training fits into the memory. If the pool is down, the task brings it up with one
        node first, and waits for this node and for the plan in a worker, even if it is deferrable.
    :param pool_name: Name or URI of the pool.
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool`` that defines the pool. Pass at most one of
        `compute_pool_conn_id` and `pool_name`.
    :param is_async: Let the setup task end before the nodes are ready. Use a ``NodesSensor`` in the block to wait for
        the nodes.
    :param exclusive: Lease these nodes in addition to the nodes of other leases, instead of sharing nodes with other
        runs. If all leases together would exceed MAX_NODES of the pool, the setup task waits in the pool's queue until
        other leases are released.
    :param options: Options of ``ScaleClusterOperator``, and two limits: ``max_lifetime`` (seconds after which the lease
        and its jobs are ended) and ``budget_node_hours`` (node-hours after which the run's lease and jobs are ended).
    :param credential_conn_ids: Ids of connections whose credentials the plan gets, for storage.
    :param prefix: Prefix of the ids of the two tasks: with ``prefix="score"`` they are ``score_lease_pool`` and
        ``score_clean_up_pool``. By default the ids are ``lease_pool`` and ``clean_up_pool``.
    :param deferrable: Whether the setup task waits for the nodes in Airflow's triggerer, without a worker. By default,
        Airflow's setting ``[operators] default_deferrable`` decides.
    :param task_kwargs: Arguments of Airflow's ``BaseOperator`` for the two tasks, such as ``retries``, ``queue``,
        ``executor_config``, and ``pool`` (Airflow's pool of slots, which is not the compute pool).
    """
    _check_names(prefix, task_kwargs)
    start = "" if prefix is None else f"{prefix}_"
    common = {"pool_name": pool_name, "compute_pool_conn_id": compute_pool_conn_id, **task_kwargs}
    try:
        setup = LeasePoolOperator(
            task_id=f"{start}{ONLY_LEASE}",
            size=size,
            plan_for=plan_for,
            credential_conn_ids=credential_conn_ids,
            is_async=is_async,
            exclusive=exclusive,
            options=options,
            deferrable=deferrable,
            **common,
        )
        teardown = CleanupPoolOperator(task_id=f"{start}{_TEARDOWN_ID}", **common)
    except DuplicateTaskIdFound as error:
        raise InvalidArgumentError(
            f'{error}: give each pool_for_run of a DAG its own prefix, for example prefix="score"'
        ) from error
    dag = setup.get_dag()
    if not isinstance(dag, DAG):
        raise InvalidArgumentError("pool_for_run is used outside of a DAG: use it inside @dag or `with DAG(...)`")
    tasks = PoolTasks(setup, teardown)
    if setup.get_closest_mapped_task_group() is not None:
        raise InvalidArgumentError(
            "pool_for_run cannot be used inside a mapped task group, because the instances of the group would share "
            "one lease and release each other's nodes: put the task group inside the block of pool_for_run instead"
        )
    setup.lease = teardown.lease = setup.task_id
    with teardown.as_teardown(setups=setup):
        # If the block is inside another setup and teardown of Airflow, this ``with`` statement orders the four tasks:
        # outer setup, setup of the block, teardown of the block, outer teardown.
        pass
    before = set(dag.task_dict)
    around = _open_blocks.get()
    token = _open_blocks.set((*around, tasks))
    try:
        yield tasks
    finally:
        _open_blocks.reset(token)
    created = [task for task_id, task in dag.task_dict.items() if task_id not in before]
    _order(tasks, created)
    _set_leases(tasks, created, around)


def _order(tasks: PoolTasks, created: list[Operator]) -> None:
    """Order the tasks of a ``with pool_for_run(...)`` block: each task runs after the block's setup task and before the
    block's teardown task.

    Airflow's own context manager for setup and teardown does not order the tasks correctly, for two reasons. First,
    Airflow orders only plain operators. Second, Airflow orders the teardown only after the last tasks of the block. In
    versions of Airflow 3 without the fix apache/airflow#64181, the teardown then runs as soon as one of the block's
    last tasks is upstream_failed, while other tasks of the block still run. So here the teardown is ordered after every
    task of the block.
    """
    setup, teardown = tasks.setup, tasks.teardown
    outside = setup.get_flat_relative_ids(upstream=True) | teardown.get_flat_relative_ids(upstream=False)
    inside = {task.task_id: task for task in created if task.task_id not in outside}
    for task in inside.values():
        is_first = not task.upstream_task_ids & inside.keys()
        rule, block = TriggerRule(task.trigger_rule), inside.keys() | {setup.task_id}
        has_upstream_before = any(
            one.task_id not in block and not one.get_flat_relative_ids(upstream=True) & block
            for one in task.upstream_list
        )
        # The task could start before the setup task ends, or would never start.
        if (
            rule is TriggerRule.ALWAYS
            or (is_first and rule in _RULES_REFUSED_AFTER_SETUP)
            or (rule in _RULES_OF_EARLY_STARTS and has_upstream_before)
        ):
            raise InvalidArgumentError(
                f'task "{task.task_id}" in the block of pool_for_run has trigger_rule="{rule.value}", so the '
                f'task does not wait for {setup.task_id}: use "all_success", "none_failed" or "all_done"'
            )
        if is_first and task.task_id not in setup.downstream_task_ids:
            setup.set_downstream(task)
        # A nested block's setup task needs no edge to the outer block's teardown task, because the nested block's
        # teardown task runs between them.
        if not task.is_setup and task.task_id not in teardown.upstream_task_ids:
            teardown.set_upstream(task)


def _set_leases(tasks: PoolTasks, created: list[Operator], around: tuple[PoolTasks, ...]) -> None:
    """Set the argument `lease` of the tasks in a ``with pool_for_run(...)`` block, so that these tasks use the nodes
    that the block leases.

    In nested blocks, a task gets the lease of the innermost block that leases the task's pool. A lease that the user
    has set is not changed.
    """
    pool = pool_of(vars(tasks.setup))
    outer_pools = {pool_of(vars(one.setup)) for one in around}
    for task in created:
        if not is_a(task, PoolOperator):
            continue
        arguments = arguments_of(task)
        its_pool = pool_of(arguments)
        belongs_here = its_pool in (None, pool) or its_pool not in outer_pools
        if belongs_here and arguments.get("lease") is None:
            arguments["lease"] = tasks.setup.task_id


def _check_names(prefix: Any, task_kwargs: Mapping[str, Any]) -> None:
    """Check the prefix, and the arguments for the setup task and the teardown task, because Airflow's own error would
    not say which arguments exist."""
    if prefix is not None and (not isinstance(prefix, str) or not prefix):
        raise InvalidArgumentError(
            f'prefix={shown(prefix)} is not legal: use letters, digits, "-" and "_", for example prefix="score"'
        )
    legal = set(inspect.signature(BaseOperator.__init__).parameters) - {"self", "kwargs", *_OWN_ARGUMENTS}
    for name, value in task_kwargs.items():
        if name in _OWN_ARGUMENTS:
            raise InvalidArgumentError(f"pool_for_run does not take {name}: {_OWN_ARGUMENTS[name]}")
        if name not in legal:
            near = difflib.get_close_matches(name, [*legal, *inspect.signature(pool_for_run).parameters], n=1)
            hint = f": did you mean {near[0]}?" if near else "; allowed: arguments of pool_for_run and BaseOperator"
            raise InvalidArgumentError(f'unknown argument "{name}" of pool_for_run{hint}')
        if name == "pool":
            check_slots(value)
