"""Check the arguments of operators as far as they are known while Airflow loads the DAG.

Templates and results of other tasks are known only when the task starts, and are checked there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.definitions.mappedoperator import MappedOperator
from pydantic import BaseModel

from shoal.airflow.hooks import ComputePoolHook
from shoal.data.spec import is_relative
from shoal.errors import InvalidArgumentError, shown
from shoal.pool.spec import PoolSpec, ScaleOptions, checked_size, is_uri
from shoal.training.locations import SQLITE
from shoal.training.pytorch.program import is_name

UNKNOWN = object()
"""Placeholder for an argument of a mapped task that gets its value only when the task runs."""

_TEMPLATE_MARKS = ("{{", "{%", "{#")

_USERS_OWN = frozenset({"params", "hyper_params", "args", "kwargs"})
"""Fields of a spec that contain the user's own values. A list named `paths` inside such a field is a value of the user,
and not the paths of a dataset."""

_ONE_PATH = ("artifact_location", "output_path")
_SEVERAL_PATHS = ("paths", "code")


class Arguments(dict[str, Any]):
    """Arguments of an operator by name. For a missing argument, ``arguments[name]`` returns `UNKNOWN`.

    :param given: The arguments.
    :param in_task: Whether this code runs in an Airflow task, which can read the store. False while Airflow loads the
        DAG.
    """

    def __init__(self, given: Mapping[str, Any], *, in_task: bool) -> None:
        super().__init__(given)
        self.in_task = in_task

    def __missing__(self, name: str) -> object:
        return UNKNOWN


def is_known(value: Any) -> bool:
    """Return whether a value is known while Airflow loads the DAG. Templates and results of tasks are not known then,
    and neither are collections that contain them."""
    if isinstance(value, str):
        return not any(mark in value for mark in _TEMPLATE_MARKS)
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_known, value))
    if isinstance(value, os.PathLike):
        return is_known(str(value))
    # Three kinds of values become known only during the run: results of tasks (with a method `resolve`), functions that
    # compute the value, and objects that contain templates. Airflow itself recognises them by the same three checks.
    return value is not UNKNOWN and not (
        hasattr(value, "resolve") or callable(value) or hasattr(value, "template_fields")
    )


def check_slots(pool: Any) -> None:
    """Check that the argument `pool` is not the URI of a compute pool, because `pool` names one of Airflow's own pools
    of slots.

    Raises:
        InvalidArgumentError: The argument is the URI of a compute pool.
    """
    if isinstance(pool, str) and is_uri(pool):
        raise InvalidArgumentError(
            f"pool={shown(pool)} is a compute pool, but the argument pool takes the name of one of Airflow's own pools "
            "of slots: use pool_name= instead"
        )


def check_pool(arguments: Arguments) -> PoolSpec | None:
    """Check the arguments that select the compute pool.

    Returns:
        The definition of the pool; None if it is not known yet, or if a name or a connection selects the pool.

    Raises:
        InvalidArgumentError: The pool is named twice, or its name or URI is wrong.
    """
    check_slots(arguments["pool"])
    name, connection = arguments["pool_name"], arguments["compute_pool_conn_id"]
    if is_known(name) and is_known(connection):
        ComputePoolHook(connection, name)
    if not name or not is_known(name):
        return None
    if not isinstance(name, str):
        raise InvalidArgumentError(f"pool_name={shown(name)}: it has to be the name or the URI of a pool")
    spec = PoolSpec.parse(name if is_uri(name) else {"name": name})
    return spec if is_uri(name) else None


def check_waits(arguments: Arguments) -> None:
    """Check the arguments `deferrable`, `wait_for_completion`, `is_async` and `poll_interval` of a task.

    Raises:
        InvalidArgumentError: `deferrable`, `wait_for_completion` or `is_async` is not a bool, or `poll_interval` is not
            above 0.
    """
    for name in ("deferrable", "wait_for_completion", "is_async"):
        if is_known(arguments[name]) and not isinstance(arguments[name], bool | None):
            raise InvalidArgumentError(f"{name}={shown(arguments[name])}: it has to be True or False")
    interval = arguments["poll_interval"]
    if interval is None or not is_known(interval):
        return
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 < interval < float("inf"):
        raise InvalidArgumentError(f"poll_interval={shown(interval)}: it has to be a number of seconds above 0")


def is_a(task: BaseOperator | MappedOperator, *kinds: type) -> bool:
    """Return whether a task's operator is an instance of one of the given classes. The task may be mapped."""
    return issubclass(task.operator_class if isinstance(task, MappedOperator) else type(task), kinds)


def arguments_of(task: BaseOperator | MappedOperator) -> dict[str, Any]:
    """Return the arguments of a task by name. For a mapped task, return the arguments that all its instances share.

    Changing the returned dict changes the task.
    """
    return task.partial_kwargs if isinstance(task, MappedOperator) else vars(task)


def pool_of(arguments: Mapping[str, Any]) -> str | None:
    """Return a text that identifies the pool of a task, or None if the task names no pool.

    The name and the URI of a pool give the same text. A connection gives a different text, because the name of the
    connection's pool is not looked up.
    """
    name, connection = arguments.get("pool_name"), arguments.get("compute_pool_conn_id")
    if connection:
        return f"connection {connection}"
    return name.partition("?")[0].rpartition("://")[2] if isinstance(name, str) else None


def check_nodes(
    arguments: Arguments, name: str, pool: PoolSpec | None, options_type: type[ScaleOptions] = ScaleOptions
) -> None:
    """Check the number of nodes that an operator requests. Also check the options of the request, if the operator has
    such options.

    Raises:
        InvalidArgumentError: The number is above MAX_NODES of the pool, or an option is wrong.
    """
    size, options = arguments[name], arguments.get("options") or {}
    if not isinstance(options, Mapping):
        if is_known(options):
            raise InvalidArgumentError(f"options={shown(options)}: it has to be a dict")
        options = {}
    options_type.check(options, is_known)
    if not is_known(size):
        return
    count = node_count(size, name)
    if pool is not None:
        _check_limit(count, name, pool, in_task=arguments.in_task)
    if is_known(options):
        options_type.for_size(options, count)


def _check_limit(size: int, name: str, pool: PoolSpec, *, in_task: bool) -> None:
    """Check that a number of nodes is at most MAX_NODES, the limit of the pool.

    While Airflow loads the DAG, MAX_NODES in the pool's URI is the limit, because the store is not read then. In a
    task, MAX_NODES in the store is the limit if the pool is up, because `shoal pool alter` may have changed the value.
    """
    up = pool_that_is_up(pool.name) if in_task and size > pool.max_nodes else None
    if up is None:
        pool.check_size(size, name)
    elif size > up.max_nodes:
        raise InvalidArgumentError(
            f'{name}={size} is above MAX_NODES={up.max_nodes} of pool "{pool.name}": raise the limit with '
            f"`shoal pool alter {pool.name} --max-nodes {size}`, or request at most {up.max_nodes}"
        )


def pool_that_is_up(name: str) -> PoolSpec | None:
    """Return the settings of a pool with its present MAX_NODES, from the store; None if the pool is not up."""
    from shoal.state import Store
    from shoal.state.schema import Pool, PoolState

    with Store().reading() as session:
        row = session.get(Pool, name)
    if row is None or row.state is not PoolState.UP:
        return None
    return PoolSpec.parse({**row.spec, "min_nodes": row.min_nodes, "max_nodes": row.max_nodes})


def job_pool(arguments: Arguments) -> PoolSpec | None:
    """Return the settings of the pool on which a job will run; None if they are not known yet.

    While Airflow loads the DAG, they are known if the pool is named by its URI. In a task, those of a pool that is up
    count.
    """
    name, connection = arguments["pool_name"], arguments["compute_pool_conn_id"]
    if not arguments.in_task or not (name or connection) or not is_known(name) or not is_known(connection):
        return check_pool(arguments)
    hook = ComputePoolHook(connection, name)
    name = hook.spec.name if hook.spec else hook.pool_name
    return (pool_that_is_up(name) if name else None) or hook.spec


def node_count(value: Any, name: str) -> int:
    """Convert an argument with a number of nodes to an integer. A rendered template contains the number as text.

    Raises:
        InvalidArgumentError: The value is not an integer of 1 or more.
    """
    # A rendered template is a text or, if the DAG has render_template_as_native_obj=True, perhaps a float such as 4.0.
    is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, str) and value.strip().isdecimal()
    return checked_size(int(value) if is_whole else value, name)


def check_paths(fields: Any, script: Any = None) -> None:
    """Check that the paths in an operator's arguments are absolute or URIs.

    A path that begins with a template is checked by a second call, after Airflow has rendered the template.

    Raises:
        InvalidArgumentError: A path is relative.
    """
    fields = fields.document() if hasattr(fields, "document") else fields
    found = [*_paths(fields, "")]
    if isinstance(fields, Mapping) and isinstance(model := fields.get("model"), str):
        from shoal.training.tracking import is_model_path

        if is_model_path(model):
            found.append(("model", model))
    if isinstance(script, str | os.PathLike) and not is_name(script):
        found.append(("train_func", os.fspath(script)))
    for option, path in found:
        if path and is_relative(path) and not path.startswith(_TEMPLATE_MARKS):
            raise InvalidArgumentError(
                f'{option} is the relative path "{path}", but the working folder of an Airflow task is arbitrary: '
                "write an absolute path or a URI, or build the path from the DAG file's folder, as in "
                f'f"{{Path(__file__).parent}}/{path}"'
            )


def database_connections(value: Any) -> Iterator[str]:
    """Yield the name of each database connection that a spec or dataset names, as far as the names are known."""
    value = value.to_spec() if hasattr(value, "to_spec") else value
    value = value.model_dump() if isinstance(value, BaseModel) else value
    if isinstance(value, list | tuple):
        for item in value:
            yield from database_connections(item)
    elif isinstance(value, Mapping):
        if value.get("sql") and isinstance(name := value.get("connection"), str) and is_known(name):
            yield name
        for option, item in value.items():
            if option not in _USERS_OWN:
                yield from database_connections(item)


def _paths(value: Any, option: str) -> Iterator[tuple[str, str]]:
    """Find all paths in a spec. For each path, yield a pair: the name of the option that contains the path, and the
    path."""
    value = value.model_dump() if isinstance(value, BaseModel) else value
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        inner = f"{option}.{name}" if option else str(name)
        if name in _ONE_PATH and isinstance(item, str):
            yield inner, item
        elif name == "uri" and isinstance(item, str) and item.startswith(SQLITE):
            yield inner, item.removeprefix(SQLITE)
        elif name in _SEVERAL_PATHS and isinstance(item, list | tuple):
            yield from ((inner, path) for path in item if isinstance(path, str))
        elif name not in _USERS_OWN:
            yield from _paths(item, inner)
