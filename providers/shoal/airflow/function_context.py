"""Give functions that run on a pool values of Airflow's context, such as ``run_id``.

A pool's nodes may have neither Airflow nor pendulum. So a function gets plain data in types of the standard library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

_ONLY_IN_THE_TASK = frozenset(
    {
        "asset_state_store", "conn", "dag", "dag_run", "exception", "inlet_events", "inlets", "macros", "outlet_events",
        "outlets", "task", "task_instance", "task_state_store", "ti", "triggering_asset_events", "var",
    }
)  # fmt: skip
"""Names of objects of Airflow, which only a process that runs a task can use."""


def refuse_objects_of_the_task(function: Callable[..., Any], given: Collection[str]) -> None:
    """Refuse a function with parameters to which Airflow would give objects that exist only in the task's process.

    :param function: The decorated function.
    :param given: Names of the parameters for which the caller gives arguments.
    :raises InvalidArgumentError: The function has such a parameter.
    """
    if found := sorted(inspect.signature(function).parameters.keys() & _ONLY_IN_THE_TASK - set(given)):
        raise InvalidArgumentError(
            f"{function.__name__} runs on the pool, where {' and '.join(found)} of Airflow's context cannot be used: "
            "take out the parameter, and give the function what it needs as an argument, for example "
            """name="{{ ti.task_id }}" or rate="{{ var.value.rate }}". Plain values of the context, such as ds, """
            "run_id, params and logical_date, may be parameters"
        )


def context_values(function: Callable[..., Any], context: Context) -> dict[str, Any]:
    """Return those plain values of Airflow's context that are parameters of a function, and all of them for a function
    with a parameter such as ``**context``. A value that this run does not have, such as the `logical_date` of a run
    without a date, is None.

    :param function: The decorated function.
    :param context: Airflow's context of the task.
    """
    parameters = inspect.signature(function).parameters
    usable = KNOWN_CONTEXT_KEYS - _ONLY_IN_THE_TASK
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        usable &= {*context.keys(), *parameters}
    else:
        usable &= parameters.keys()
    return {name: _plain(context.get(name)) for name in usable}


def _plain(value: Any) -> Any:
    """Convert a value of the context to types of the standard library; times become times in UTC."""
    if isinstance(value, datetime):
        at = value.astimezone(UTC)
        return datetime(at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond, UTC)
    if isinstance(value, Mapping):
        # The parameters of a run give their values only by this access.
        return {name: _plain(value[name]) for name in value}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
