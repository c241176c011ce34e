"""Compute the digest of a task as it is written in the DAG file, by which a retry recognises the job of its task."""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG, BaseOperator, TaskGroup, XComArg
from airflow.sdk.definitions.mappedoperator import MappedOperator

from shoal.airflow.checks import arguments_of, is_known
from shoal.training.pytorch.program import is_name
from shoal.training.pytorch.script import Script

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
    from shoal.training.code_digest import code_digest

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
