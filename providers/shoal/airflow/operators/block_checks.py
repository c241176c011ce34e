"""Check the arguments of the tasks in a ``with pool_for_run(...)`` block. The block's setup task runs the check before
it requests nodes.

The setup task can render those templates that have the same value in all tasks of a DAG run, and can read the results
of earlier tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, TriggerRule, XComArg
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.base.checked import CheckedOperator, is_in_task
from shoal.airflow.checks import database_connections, is_known
from shoal.airflow.database_urls import database_url
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

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
    :param context: Airflow's context of the setup task.
    :raises InvalidArgumentError: An argument of a task is wrong.
    :raises AirflowFailException: The same in an Airflow task, or a connection in a spec does not exist.
    """
    dag = setup.get_dag()
    for task in dag.tasks if dag else ():
        if isinstance(task, CheckedOperator) and vars(task).get("lease") == setup.task_id and _will_run(task, setup):
            rendered = {name: _rendered(getattr(task, name), task, setup, context) for name in task.template_fields}
            task.check(task.task_id, {**vars(task), **rendered})
            if is_in_task():
                _check_connections(task, rendered)


def _check_connections(task: BaseOperator, rendered: Mapping[str, Any]) -> None:
    """Check that the database connections in a task's spec exist, which Airflow's secrets backends are asked for only
    in a task."""
    from shoal.jobs.credentials import connections

    try:
        connections(database_connections([rendered.get("spec"), rendered.get("dataset")]), os.environ, database_url)
    except InvalidArgumentError as error:
        raise AirflowFailException(f"task {task.task_id}: {error}") from error


def _will_run(task: BaseOperator, setup: BaseOperator) -> bool:
    """Return whether a task of a ``with pool_for_run(...)`` block certainly runs if no other task fails."""
    before = setup.get_flat_relative_ids(upstream=True)
    between = (one for one in task.get_flat_relatives(upstream=True) if one.task_id not in before)
    # Operators that are not from shoal, such as a branch, may skip the tasks after them.
    return TriggerRule(task.trigger_rule) not in _MAY_NEVER_RUN and all(
        isinstance(one, CheckedOperator) for one in between
    )


def _rendered(value: Any, task: BaseOperator, setup: BaseOperator, context: Context) -> Any:
    """Render the value of a template field in the same way as Airflow does later, when the task runs. Parts that are
    not known yet stay unrendered.

    :param value: The value.
    :param task: Task of the value.
    :param setup: The setup task, which runs now.
    :param context: Airflow's context of the setup task.
    """
    if isinstance(value, Mapping):
        return {name: _rendered(item, task, setup, context) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rendered(item, task, setup, context) for item in value]
    if is_known(value):
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
