"""Callbacks that send a message about jobs and models with any of Airflow's notifiers, such as ``SmtpNotifier``.

The notifier's templates can use ``{{ shoal.subject }}``, ``{{ shoal.text }}`` and ``{{ shoal.html }}``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from airflow.sdk.definitions.context import Context
from airflow.sdk.execution_time import task_runner

from shoal import jobs
from shoal.airflow import results
from shoal.airflow.operators import CheckModelsOperator, ModelAlertError, PromoteModelOperator
from shoal.airflow.operators.base import is_a
from shoal.airflow.operators.job_operator import JobOperator
from shoal.secrets.redaction import one_line

Notifier: TypeAlias = "Callable[[Context], Any]"
"""One of Airflow's notifiers, or another callable that takes the context."""

log = logging.getLogger(__name__)

_MOST_NAMES = 3


def model_message(notifier: Notifier) -> Callable[[Context], None]:
    """Return a task callback, which sends one message about the outcome of the task.

    Use the callback as ``on_success_callback`` and ``on_failure_callback`` (and ``on_skipped_callback``) of an operator
    that runs a job or of a ``PromoteModelOperator``, mapped or not, and of a ``CheckModelsOperator``. The message of
    any other task has only its state, and the error if it has failed.

    :param notifier: Notifier that sends the message. In the notifier's templates, ``shoal`` is the message. The
        notifier is copied for each message, because rendering replaces its templates.
    """
    return partial(_send, notifier, _about_task)


def run_message(notifier: Notifier) -> Callable[[Context], None]:
    """Return a DAG callback, which sends one message per DAG run.

    The message begins with the state of the run. Then come the tasks of any kind that have failed, and a line for each
    job. Use the callback as ``on_success_callback`` and ``on_failure_callback`` of the DAG. Airflow calls the callback
    in its DAG processor, so shoal and the notifier's packages must be installed there. ``dag.test()`` sends no message.

    :param notifier: Notifier that sends the message. In the notifier's templates, ``shoal`` is the message.
    """
    return partial(_send, notifier, _about_run)


def _send(notifier: Notifier, about: Callable[[Context], jobs.Message | None], context: Context) -> None:
    if (message := about(context)) is not None:
        copy.copy(notifier)(cast("Context", {**context, "shoal": message}))


def _about_task(context: Context) -> jobs.Message:
    error, ti = context.get("exception"), context["ti"]
    if isinstance(error, ModelAlertError):
        return error.message
    said = results.error_text(error) if error else ""
    # In the callback of a killed task, which has stored no line, Airflow gives neither the state nor an error.
    state = "failed" if error else _text(getattr(ti, "state", "success"))
    ended = _ended(ti, ti.task_id, -1 if ti.map_index is None else ti.map_index, state or "failed")
    if ended.line is None:
        no_line = "no alerts" if isinstance(context["task"], CheckModelsOperator) else "it has stored no outcome"
        why = said or (results.where_log(ti, ended.task_id, ended.map_index) if ended.state == "failed" else no_line)
        return jobs.Message(f"{ended.state}: task {ended.name}", ended.text(why))
    line = ended.line
    if state == "failed" and line.outcome != "failed":
        cause = f"task {ended.name} failed after its job: {said or 'see its log'}"
        line = line.model_copy(update={"outcome": "failed", "sentence": f"{cause}; {line.outcome}: {line.sentence}"})
    return jobs.summary_message([line])


@dataclass(frozen=True)
class _Ended:
    """How a task instance has ended: its state in Airflow, and the line about its job; None if there is no line."""

    task_id: str
    map_index: int
    state: str
    line: jobs.ModelLine | None = None

    @property
    def name(self) -> str:
        return results.instance_name(self.task_id, self.map_index)

    def text(self, why: str) -> str:
        return f"{self.state:<9} task {self.name}: {why}"


def _ended(ti: Any, task_id: str, map_index: int, state: str) -> _Ended:
    """Return how a task instance of a task that runs a job has ended."""

    stored = ti.xcom_pull(task_ids=task_id, key=results.LINE, map_indexes=map_index)
    line = None if stored is None else jobs.ModelLine.parse(stored)
    if line is not None and state in ("success", "skipped"):
        # The line is that of an earlier run if the task was cleared and has not run again, or if a user has marked it.
        of_line = line.outcome if line.outcome in ("failed", "skipped") else "success"
        line = line if of_line == state else None
    return _Ended(task_id, map_index, state, line)


def _about_run(context: Context) -> jobs.Message | None:
    # `dag.test()` calls the callback without a connection to Airflow, which would answer how the tasks have ended.
    if not hasattr(task_runner, "SUPERVISOR_COMMS"):
        log.info("no message about the run of DAG %s is sent, because dag.test() has run it", context["dag"].dag_id)
        return None
    dag, reason = context["dag"], context.get("reason")
    state = _text(getattr(context.get("dag_run"), "state", None)) or ("success" if reason == "success" else "failed")
    # The context of a DAG run without task instances contains no `ti`.
    ended = [] if context.get("ti") is None else list(_instances(context["ti"], dag))
    failed, not_run = ([one.name for one in ended if one.state == state] for state in ("failed", "upstream_failed"))
    subject = f"{dag.dag_id}: {state}"
    if failed:
        subject += f", but {_named(failed)} failed" if state == "success" else f": {_named(failed)}"
    elif reason and reason != state:
        subject += f" ({reason})"
    texts = [_why_failed(context["ti"], one) for one in ended if one.state == "failed"]
    if not_run:
        texts.append(f"not run   {_named(not_run)}: a task before has failed")
    lines = [one.line for one in ended if one.line is not None and one.line.outcome != "failed"]
    # Of a version that the run has promoted or refused later, only the decision is told.
    decided = {(line.model, line.version) for line in lines if line.outcome in ("promoted", "kept")}
    lines = [line for line in lines if line.outcome != "waiting" or (line.model, line.version) not in decided]
    if lines:
        message = jobs.summary_message(lines)
        subject = f"{subject}; {message.subject}"
        texts.append(message.text)
    texts += [
        one.text(one_line(results.why_no_result(context["ti"], dag, one.task_id, one.map_index, one.state)))
        for one in ended
        if one.line is None and one.state in ("success", "skipped")
    ]
    return jobs.Message(subject, "\n".join([subject, *texts, f"run {context['run_id']}"]))


def _instances(ti: Any, dag: Any) -> Iterator[_Ended]:
    """Yield how the task instances of a DAG run have ended, in the order in which the DAG file creates the tasks: those
    of tasks that run a job or promote a model, and those of all tasks that have failed or were not run."""
    task_ids = [task.task_id for task in dag.tasks]
    states = results.states_of(ti, task_ids)
    for task in dag.tasks:
        for index in results.instances_of(task.task_id, states, task_ids):
            state = _text(states[results.state_key(task.task_id, index)])
            if state in ("failed", "skipped", "success") and is_a(task, JobOperator, PromoteModelOperator):
                yield _ended(ti, task.task_id, index, state)
            elif state in ("failed", "upstream_failed"):
                yield _Ended(task.task_id, index, state)


def _why_failed(ti: Any, ended: _Ended) -> str:
    """Return the line about a failed task: its cause, and where its log is."""
    line, cause = ended.line, results.cause_of(ti, ended.task_id, ended.map_index)
    told = [one_line(cause)] if cause else []
    if line is not None and line.outcome == "failed":
        told = [f"{line.model}: {line.sentence}"]
    elif line is not None:
        told = [": ".join([line.model, "the task failed after its job", *told])]
    return ended.text("; ".join([*told, results.where_log(ti, ended.task_id, ended.map_index)]))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"task{'' if len(names) == 1 else 's'} {', '.join(names[:_MOST_NAMES])}{more}"


def _text(state: Any) -> str:
    """Return a state, which may be a member of one of Airflow's enums, as text; empty if there is none."""
    return str(getattr(state, "value", state) or "")
