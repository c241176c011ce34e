"""Find the problems of a loaded DAG: in its leases, clean-up, arguments, retries and connections."""

from __future__ import annotations

import dis
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, NoReturn

from airflow.sdk import DAG, BaseOperator, TriggerRule
from airflow.sdk.definitions.mappedoperator import MappedOperator

from shoal.airflow.operators import (
    BatchPredictOperator,
    CheckModelsOperator,
    CleanupPoolOperator,
    LeasePoolOperator,
    PromoteModelOperator,
    ScaleClusterOperator,
    base,
)
from shoal.airflow.operators.job_operator import JobOperator, missing_lease
from shoal.airflow.operators.nodes import OF_THE_RUN, check_block
from shoal.airflow.operators.training import same_output
from shoal.airflow.results import no_retry_of_permanent_errors
from shoal.airflow.testing.check import Rule
from shoal.data.connections import connection_variable
from shoal.errors import InvalidArgumentError

_Operator = BaseOperator | MappedOperator

_SAMPLE_DATE = (2026, 1, 31)
"""Logical date with which templates are rendered. Any date is possible, but each check has to use the same date."""

_RUN_AFTER_FAILURES = frozenset({TriggerRule.ALL_DONE, TriggerRule.ALWAYS, TriggerRule.ALL_DONE_SETUP_SUCCESS})

_RAISES_PERMANENT_ERRORS = (
    "shoal.airflow.hooks",
    "shoal.data",
    "shoal.distributors",
    "shoal.jobs",
    "shoal.models",
    "shoal.pool",
)
"""Packages whose functions raise errors that every retry would meet again."""


def problems(dag: DAG, always_up: Collection[str]) -> Iterator[tuple[Rule, str, str]]:
    """Yield each violation of a rule by a task of a DAG: the rule, what is wrong, and the id of the task."""
    for task in dag.tasks:
        for rule, message in (
            (Rule.NO_CLEANUP, _missing_cleanup(task)),
            (Rule.NO_LEASE, _missing_lease(task, always_up)),
            (Rule.WRONG_ARGUMENT, _error_in_run(task, dag)),
            (Rule.WRONG_ARGUMENT, _error_in_dag(task)),
            (Rule.USELESS_RETRIES, _useless_retries(task)),
        ):
            if message is not None:
                yield rule, message, task.task_id


def connections(task: _Operator) -> Iterator[tuple[str, bool]]:
    """Yield the id of each connection that a task's arguments name, and whether the connection must define a pool."""
    for name, value in base.arguments_of(task).items():
        if name.endswith("conn_id") and isinstance(value, str) and value and base.is_known(value):
            yield value, name == "compute_pool_conn_id"
    if base.is_a(task, JobOperator, PromoteModelOperator):
        named = base.arguments_of(task).get("credential_conn_ids") or ()
        yield from ((conn_id, False) for conn_id in named if isinstance(conn_id, str))
    if base.is_a(task, JobOperator):
        specs = [base.arguments_of(task).get(name) for name in ("spec", "dataset")]
        mapped = task.expand_input.value if isinstance(task, MappedOperator) else None
        for prefix, connection in base.named_connections([*specs, mapped]):
            if connection_variable(connection, prefix) not in os.environ:
                yield connection, False


def _may_share_pool(one: _Operator, other: _Operator) -> bool:
    """Return whether two tasks may use the same pool. The result is False only if both pools are known while Airflow
    loads the DAG, and differ."""
    pools = [base.pool_of(base.arguments_of(task)) for task in (one, other)]
    return pools[0] == pools[1] or not all(pool is not None and base.is_known(pool) for pool in pools)


def _missing_cleanup(task: _Operator) -> str | None:
    leases = base.is_a(task, LeasePoolOperator)
    if not leases and not base.is_a(task, ScaleClusterOperator):
        return None
    after = [one for one in task.get_flat_relatives(upstream=False) if _may_share_pool(one, task)]
    # A DAG that only sets the size of a pool, for example for the night, needs no clean-up.
    if not leases and not any(
        base.is_a(one, base.CheckedOperator) and not base.is_a(one, ScaleClusterOperator) for one in after
    ):
        return None
    for one in after:
        gives_back = (
            base.is_a(one, CleanupPoolOperator) if leases else base.is_a(one, CleanupPoolOperator, ScaleClusterOperator)
        )
        if gives_back and (one.is_teardown or TriggerRule(one.trigger_rule) in _RUN_AFTER_FAILURES):
            return None
    did = "leases nodes" if leases else "scales the pool"
    return f"task {task.task_id} {did}, and no teardown gives the nodes back if a task fails: use pool_for_run"


def _missing_lease(task: _Operator, always_up: Collection[str]) -> str | None:
    if not base.is_a(task, JobOperator):
        return None
    before = task.get_flat_relatives(upstream=True)
    claims = [one for one in before if base.is_a(one, LeasePoolOperator, ScaleClusterOperator)]
    arguments = base.arguments_of(task)
    spec: Any = arguments.get("spec")
    document = spec.document() if hasattr(spec, "document") else spec
    config = document.get("run_config") if isinstance(document, Mapping) else None
    in_spec = config.get("pool_name") if isinstance(config, Mapping) else None
    named = in_spec if isinstance(in_spec, str) and base.is_known(in_spec) else None
    name = arguments.get("compute_pool_conn_id") or base.pool_of(arguments) or named
    if name in always_up:
        return None
    if (message := missing_lease(task)) is not None:
        return message
    if arguments.get("lease") or any(_may_share_pool(task, claim) for claim in claims):
        return None
    where = "a pool" if name is None else f"the pool {name}"
    if arguments.get("compute_pool_conn_id"):
        where = f"the pool of the connection {name}"
    return (
        f"task {task.task_id} runs on {where}, and no earlier task leases nodes of this pool: use pool_for_run; if the "
        "pool is always up, name it with --always-up (always_up=) instead"
    )


def _error_in_run(setup: _Operator, dag: DAG) -> str | None:
    """Return the error that the setup task of a ``with pool_for_run(...)`` block would raise in a run with the default
    params; None if there is no error."""
    if not isinstance(setup, LeasePoolOperator):
        return None
    try:
        check_block(setup, _sample_context(dag))
    except InvalidArgumentError as error:
        return f"in a run with the default params: {error}"
    return None


def _error_in_dag(task: _Operator) -> str | None:
    """Return what is wrong in the arguments of a task that concern its DAG, and that Airflow does not refuse, because
    the task is decorated and mapped, or because a run may nevertheless succeed."""
    try:
        if base.is_a(task, base.PoolOperator):
            base.check_in_dag(task)
    except InvalidArgumentError as error:
        return str(error)
    return same_output(task) if base.is_a(task, BatchPredictOperator) else None


class _NotKnown:
    """Placeholder for a value that is known only during a DAG run. Rendering a template that uses the placeholder
    raises an error, so that the template stays unrendered."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"the value of {name} is known only during a DAG run")

    def __str__(self) -> str:
        raise RuntimeError("the value is known only during a DAG run")

    __getitem__ = __getattr__
    __iter__ = __bool__ = __len__ = __str__


def _sample_context(dag: DAG) -> Any:
    """Return a sample of Airflow's context for checks before a DAG run, with a sample date and the default values of
    the params."""
    import pendulum

    date = pendulum.datetime(*_SAMPLE_DATE)
    known = {
        "dag": dag,
        "data_interval_end": date,
        "data_interval_start": date,
        "ds": date.format("YYYY-MM-DD"),
        "ds_nodash": date.format("YYYYMMDD"),
        "logical_date": date,
        "run_id": f"scheduled__{date.isoformat()}",
        "ts": date.isoformat(),
        "ts_nodash": date.format("YYYYMMDD[T]HHmmss"),
    }
    # A DAG without a schedule is started by a user, who may have to enter the params. So its default params are not
    # used.
    if dag.schedule is not None:
        with suppress(Exception):  # `dump` fails if a param has no default value.
            known["params"] = dag.params.dump()
    return {**{name: _NotKnown() for name in OF_THE_RUN}, **known}


def _useless_retries(task: _Operator) -> str | None:
    retries = task.retries
    if not retries:
        return None
    arguments = base.arguments_of(task)
    if base.is_a(task, CheckModelsOperator):
        return f"task {task.task_id} has retries={retries}, but its error is never retried: set retries=0"
    function = arguments.get("python_callable")
    if base.is_a(task, base.PoolOperator) or arguments.get("retry_policy") is not None or not callable(function):
        return None
    if not _calls_shoal(function):
        return None
    return (
        f"task {task.task_id} calls shoal with retries={retries}, which would retry a wrong argument: use "
        "`with no_retry_of_permanent_errors():` in the function or, from Airflow 3.3, "
        "retry_policy=FailOnPermanentErrors() (both are in shoal.airflow.results)"
    )


def _calls_shoal(function: Callable[..., Any]) -> bool:
    """Return whether a function uses parts of shoal that raise permanent errors, and does not use
    `no_retry_of_permanent_errors`."""
    plain = unwrap(function)
    if not isinstance(plain, FunctionType):
        return False
    used: set[str] = set()
    converts = _is_decorated(function)
    for name, is_import in _names(plain.__code__):
        if is_import:
            used.add(name)
        elif name in plain.__globals__:
            value = plain.__globals__[name]
            converts = converts or value is no_retry_of_permanent_errors
            used.add(str(getattr(value, "__module__", None) or getattr(value, "__name__", "")))
        converts = converts or name == no_retry_of_permanent_errors.__name__
    return not converts and any(
        module == "shoal" or f"{module}.".startswith(tuple(f"{package}." for package in _RAISES_PERMANENT_ERRORS))
        for module in used
    )


def _is_decorated(function: Callable[..., Any]) -> bool:
    """Return whether `no_retry_of_permanent_errors` decorates a function."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # Python raises ValueError if the closure's variable was never assigned.
            if getattr(cell.cell_contents, "func", None) is unwrap(no_retry_of_permanent_errors):
                return True
    return False


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the names that a code object and its nested functions use. Each name comes with a bool: whether the name is
    that of an imported module."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, str) and step.opname in ("IMPORT_NAME", "LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM"):
            yield step.argval, step.opname == "IMPORT_NAME"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
