"""Refuse relative paths in the arguments of operators: the working folder of a task of Airflow is arbitrary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from shoal.data.spec import is_relative
from shoal.errors import InvalidArgumentError
from shoal.training.pytorch.train_func import is_name

_USERS_OWN = frozenset({"params", "hyper_params", "args", "kwargs"})
"""Fields of a spec that contain the user's own values. A list `paths` in them is not a dataset's."""

_ONE_PATH = ("artifact_location", "output_path")
_SEVERAL_PATHS = ("paths", "code")


def check_paths(task_id: str, fields: Any, script: Any = None) -> None:
    """Check that the paths in an operator's arguments are absolute or URIs.

    A path that begins with a template is checked by a second call, after Airflow has rendered it.

    Args:
        task_id: Id of the task, for the message.
        fields: Fields of a job's spec as a dict, or the spec itself. Any other value is not checked.
        script: The operator's `train_func`.

    Raises:
        InvalidArgumentError: A path is relative.
    """
    fields = fields.document() if hasattr(fields, "document") else fields
    found = [*_paths(fields, "")]
    if isinstance(script, str | os.PathLike) and not is_name(script):
        found.append(("train_func", os.fspath(script)))
    for option, path in found:
        if path and is_relative(path) and not path.startswith(("{{", "{%")):
            raise InvalidArgumentError(
                f'{option} of task {task_id} is the relative path "{path}", but the working folder of an Airflow task '
                "is arbitrary: write an absolute path or a URI, or build the path from the DAG file's folder, as in "
                f'f"{{Path(__file__).parent}}/{path}"'
            )


def _paths(value: Any, option: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each path in a spec's fields: the name of the option that contains the path, and the path."""
    value = value.model_dump() if isinstance(value, BaseModel) else value
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        inner = f"{option}.{name}" if option else str(name)
        if name in _ONE_PATH and isinstance(item, str):
            yield inner, item
        elif name in _SEVERAL_PATHS and isinstance(item, list | tuple):
            yield from ((inner, path) for path in item if isinstance(path, str))
        elif name not in _USERS_OWN:
            yield from _paths(item, inner)
