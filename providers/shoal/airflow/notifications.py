"""Callbacks that send a message about trained models with any of Airflow's notifiers, such as ``SmtpNotifier``.

The notifier's templates can use ``{{ shoal.subject }}``, ``{{ shoal.text }}`` and ``{{ shoal.html }}``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from shoal.airflow.operators import CheckModelsOperator, DistributedTrainOperator, ModelAlertError
from shoal.airflow.operators.base import is_a
from shoal.airflow.results import LINE, instance_name, instances_of, state_key, states_of, why_no_result

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import Message, ModelLine

Notifier: TypeAlias = "Callable[[Context], Any]"
"""One of Airflow's notifiers, or another callable that takes the context."""


def model_message(notifier: Notifier) -> Callable[[Context], None]:
    """Return a task callback, which sends one message about the task's model.

    Use the callback as ``on_success_callback`` and ``on_failure_callback`` (and ``on_skipped_callback``) of a
    ``DistributedTrainOperator`` or ``PromoteModelOperator``, mapped or not, and of a ``CheckModelsOperator``.

    :param notifier: Notifier that sends the message. In the notifier's templates, ``shoal`` is the message. The
        notifier is copied for each message, because rendering replaces its templates.
    """
    return partial(_send, notifier, _about_task)


def run_message(notifier: Notifier) -> Callable[[Context], None]:
    """Return a DAG callback, which sends one message per DAG run, with a line for each model that the run trains.

    Use the callback as ``on_success_callback`` and ``on_failure_callback`` of the DAG. Airflow calls the callback in
    its DAG processor, so shoal and the notifier's packages must be installed there.

    :param notifier: Notifier that sends the message. In the notifier's templates, ``shoal`` is the message.
    """
    return partial(_send, notifier, _about_run)


def _send(notifier: Notifier, about: Callable[[Context], Message], context: Context) -> None:
    copy.copy(notifier)(cast("Context", {**context, "shoal": about(context)}))


def _about_task(context: Context) -> Message:
    from shoal.jobs import Message, ModelLine, summary_message
    from shoal.models.model_summary import one_line

    error = context.get("exception")
    if isinstance(error, ModelAlertError):
        return error.message
    task = context["task"]
    if isinstance(task, CheckModelsOperator):
        text = f"task {task.task_id} of DAG {context['dag'].dag_id}: {one_line(str(error or 'no alerts'))}"
        return Message(text, text)
    ti = context["ti"]
    stored = ti.xcom_pull(task_ids=ti.task_id, key=LINE, map_indexes=ti.map_index)
    # The task was killed before it stored a line.
    if stored is None:
        index = -1 if ti.map_index is None else ti.map_index
        cause = one_line(str(error or "it ended without a result: see the task's log"))
        return summary_message([_unknown(ti.task_id, index, cause)])
    line = ModelLine.parse(stored)
    if error is not None and line.outcome not in ("failed", "skipped"):
        failed = f"{line.sentence}; the task failed after the training: {one_line(str(error))}"
        line = line.model_copy(update={"sentence": failed})
    return summary_message([line])


def _about_run(context: Context) -> Message:
    from shoal.jobs import Message, summary_message

    dag, reason = context["dag"], context.get("reason")
    lines = list(_lines_of_run(context))
    # Of a version that the run has promoted or refused later, only the decision is told.
    decided = {(line.model, line.version) for line in lines if line.outcome != "waiting"}
    lines = [line for line in lines if line.outcome != "waiting" or (line.model, line.version) not in decided]
    if not lines:
        text = f"{dag.dag_id}: no model was trained" + (f" ({reason})" if reason else "")
        return Message(text, f"{text}\nrun {context['run_id']}")
    message = summary_message(lines)
    return Message(f"{dag.dag_id}: {message.subject}", f"{message.text}\nrun {context['run_id']}")


def _lines_of_run(context: Context) -> Iterator[ModelLine]:
    """Yield a `ModelLine` for each training task and each promotion of a DAG run, in the order in which the DAG file
    creates the tasks."""
    from shoal.jobs import ModelLine
    from shoal.models.model_summary import one_line

    ti, dag = context.get("ti"), context["dag"]
    # The context of a DAG run without task instances contains no `ti`. The message then has no lines about models.
    if ti is None:
        return
    task_ids = [task.task_id for task in dag.tasks]
    states = states_of(ti, task_ids)
    for task in dag.tasks:
        task_id = task.task_id
        for index in instances_of(task_id, states, task_ids):
            stored = ti.xcom_pull(task_ids=task_id, key=LINE, map_indexes=index)
            if stored is not None:
                yield ModelLine.parse(stored)
            elif is_a(task, DistributedTrainOperator):
                state = states[state_key(task_id, index)]
                yield _unknown(
                    task_id, index, one_line(why_no_result(ti, dag, task_id, index, state)), skipped=state == "skipped"
                )


def _unknown(task_id: str, map_index: int, cause: str, *, skipped: bool = False) -> ModelLine:
    """Build the `ModelLine` of a training task that has stored no `ModelLine` as an XCom."""
    from shoal.jobs import ModelLine

    name = f"task {instance_name(task_id, map_index)}"
    outcome: Literal["skipped", "failed"] = "skipped" if skipped else "failed"
    return ModelLine(model=name, outcome=outcome, sentence=cause.removeprefix(f"{name} "))
