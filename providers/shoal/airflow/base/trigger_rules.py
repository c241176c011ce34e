"""Check that the trigger rules of the tasks in a ``with pool_for_run(...)`` block let these tasks wait for the block's
setup task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from airflow.sdk import BaseOperator, TriggerRule
from airflow.sdk.definitions.mappedoperator import MappedOperator

from shoal.errors import InvalidArgumentError

Operator: TypeAlias = BaseOperator | MappedOperator

_RULES_REFUSED_AFTER_SETUP = frozenset(
    {
        TriggerRule.ONE_SUCCESS,
        TriggerRule.ONE_FAILED,
        TriggerRule.ONE_DONE,
        TriggerRule.ALL_FAILED,
        TriggerRule.ALL_SKIPPED,
    }
)
"""Trigger rules that `pool_for_run` rejects for a task directly after the setup task. With such a rule, the task could
start before the setup task ends (``one_success``), or would never start, because the setup task succeeds
(``all_failed``)."""

_RULES_OF_EARLY_STARTS = frozenset({TriggerRule.ONE_SUCCESS, TriggerRule.ONE_FAILED, TriggerRule.ONE_DONE})
"""Trigger rules with which a task starts as soon as one of its upstream tasks has ended."""


def check(task: Operator, setup: BaseOperator, inside: Mapping[str, Operator], *, is_first: bool) -> None:
    """Check that the trigger rule of a task in a block lets the task wait for the block's setup task.

    :param task: The task.
    :param setup: The block's setup task.
    :param inside: The tasks of the block, by id.
    :param is_first: Whether no other task of the block is directly upstream of this task.
    :raises InvalidArgumentError: The task could start before the setup task ends, or would never start.
    """
    rule = TriggerRule(task.trigger_rule)
    if (
        rule is TriggerRule.ALWAYS
        or (is_first and rule in _RULES_REFUSED_AFTER_SETUP)
        or (rule in _RULES_OF_EARLY_STARTS and _has_upstream_before(task, setup, inside))
    ):
        raise InvalidArgumentError(
            f'task "{task.task_id}" in the block of pool_for_run has trigger_rule="{rule.value}", so the '
            f'task does not wait for {setup.task_id}: use "all_success", "none_failed" or "all_done"'
        )


def _has_upstream_before(task: Operator, setup: BaseOperator, inside: Mapping[str, Operator]) -> bool:
    """Return whether `task` has an upstream task that does not wait for the block's setup task. Such an upstream task
    is outside of the block, and depends on no task of the block."""
    block = inside.keys() | {setup.task_id}
    return any(
        one.task_id not in block and not one.get_flat_relative_ids(upstream=True) & block for one in task.upstream_list
    )
