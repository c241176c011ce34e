"""Name the task runs of jobs after their model or function. Prefect fails a task run whose name cannot be made, so
these functions return the name of the task if they cannot read its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.jobs import ModelLine, NoResult
from shoal.redaction import redact

_LONGEST = 200


def training_name(parameters: dict[str, Any]) -> str:
    """Return the name of a training's task run from the task's arguments, such as ``train delays-UA``."""
    return _name(lambda: f"train {_trained(**parameters)}", "distributed_train")


def prediction_name(parameters: dict[str, Any]) -> str:
    """Return the name of a prediction's task run, such as ``predict models:/delays@champion``."""
    return _name(lambda: f"predict {parameters['model']}", "batch_predict")


def many_models_name(parameters: dict[str, Any]) -> str:
    """Return the name of the task run of a training per partition, such as ``models by store``."""

    def name() -> str:
        by = parameters["by"]
        return f"models by {by if isinstance(by, str) else ', '.join(by)}"

    return _name(name, "many_models")


def search_name(parameters: dict[str, Any]) -> str:
    """Return the name of a search's task run, such as ``tune arr_delay``."""
    return _name(lambda: f"tune {parameters['train']['label_col']}", "tune")


def _name(name: Callable[[], str], default: str) -> str:
    try:
        return " ".join(redact(name()).split())[:_LONGEST]
    except Exception:
        return default


def _trained(*, spec: Any = None, train_func: Any = None, **_: Any) -> str:
    if train_func is None:
        return ModelLine.of(spec or {}, NoResult("")).model
    # With a function, `spec` is a dict of the other fields, which alone is no legal spec.
    fields: Mapping[str, Any] = spec or {}
    register = fields.get("register")
    model = register.get("model") if isinstance(register, Mapping) else getattr(register, "model", None)
    function = getattr(train_func, "__name__", None) or Path(train_func).name
    return str(model or fields.get("name") or function)
