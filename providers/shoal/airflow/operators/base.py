"""Base classes of operators, and the checks of arguments that are known while Airflow loads the DAG.

Templates and results of other tasks are known only when the task starts, and are checked there. Also here: the digest
of a task as it is written in the DAG file, by which a retry recognises its job.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import jinja2
from airflow.sdk import DAG, BaseOperator, TaskGroup, XComArg, get_current_context
from airflow.sdk.configuration import conf
from airflow.sdk.definitions.mappedoperator import MappedOperator, OperatorPartial
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from airflow.sdk.log import mask_secret
from jinja2.nativetypes import NativeEnvironment
from pydantic import BaseModel

from shoal import jobs
from shoal.airflow.deployment import holder_of, is_single_task_test, task_key, team_of, warn_of_copies
from shoal.airflow.hooks import ComputePoolHook, database_url, environment_of, secret_variable
from shoal.data.connections import CONNECTION_PREFIX, STORAGE_PREFIX, split_storage
from shoal.data.dataset_spec import is_relative
from shoal.data.parquet.files import refuse_credentials
from shoal.errors import InvalidArgumentError, ShoalError, shown
from shoal.pool.spec import PoolSpec, ScaleOptions, checked_size, is_uri, spec_of_row
from shoal.secrets.redaction import has_credentials, redact
from shoal.training.locations import SQLITE
from shoal.training.pickling import code_digest
from shoal.training.pytorch.program import Script, is_name

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.pool.api import ComputePool
    from shoal.pool.status import PoolStatus


UNKNOWN = object()
"""Placeholder for an argument of a mapped task that gets its value only when the task runs."""

_TEMPLATE_MARKS = ("{{", "{%", "{#")
_TEMPLATE = re.compile(r"\{[{%#].*?[}%#]\}", re.DOTALL)

_USERS_OWN = frozenset({"params", "hyper_params", "args", "kwargs"})
"""Fields of a spec that contain the user's own values. A list named `paths` inside such a field is a value of the user,
and not the paths of a dataset."""

_ONE_PATH = ("artifact_location", "output_path")
_SEVERAL_PATHS = ("paths", "code")


class Arguments(dict[str, Any]):
    """Arguments of an operator by name. For a missing argument, ``arguments[name]`` returns `UNKNOWN`."""

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


def check_slots(pool: Any, compute_pools: Collection[str | None] = (), task: str = "") -> None:
    """Check that the argument `pool`, which names one of Airflow's own pools of slots, is neither the URI of a compute
    pool nor the name of one of the given compute pools. `task` is the beginning of the error message.

    Raises:
        InvalidArgumentError: The argument is a compute pool.
    """
    if isinstance(pool, str) and (is_uri(pool) or pool in compute_pools):
        raise InvalidArgumentError(
            f"{task}pool={shown(pool)} is a compute pool, but the argument pool takes the name of one of Airflow's own "
            "pools of slots: use pool_name= instead"
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
        # While Airflow loads the DAG, MAX_NODES in the pool's URI is the limit, because the store is not read then. In
        # a task, MAX_NODES in the store is the limit if the pool is up, because `shoal pool alter` may have changed it.
        up = pool_that_is_up(pool.name) if is_in_task() and count > pool.max_nodes else None
        (up or pool).check_size(count, name, is_up=up is not None)
    if is_known(options):
        options_type.for_size(options, count)


def pool_that_is_up(name: str) -> PoolSpec | None:
    """Return the settings of a pool with its present MAX_NODES, from the store; None if the pool is not up, or
    if this process lacks its backend."""
    from shoal.state import Store
    from shoal.state.schema import Pool, PoolState

    row = Store().get(Pool, name)
    return None if row is None or row.state is not PoolState.UP else spec_of_row(row.spec)


def job_pool(arguments: Arguments) -> PoolSpec | None:
    """Return the settings of the pool on which a job will run; None if they are not known yet.

    While Airflow loads the DAG, they are known if the pool is named by its URI. In a task, those of a pool that is up
    count.
    """
    name, connection = arguments["pool_name"], arguments["compute_pool_conn_id"]
    if not is_in_task() or not (name or connection) or not is_known(name) or not is_known(connection):
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
    """Check that the paths in an operator's arguments are absolute or URIs, and that those of datasets have no
    credentials.

    A path that begins with a template is checked by a second call, after Airflow has rendered the template.

    Raises:
        InvalidArgumentError: A path is relative, or has credentials.
    """
    fields = fields.document() if hasattr(fields, "document") else fields
    found = [*_paths(fields, "")]
    for option in ("model", "init_model"):
        if isinstance(fields, Mapping) and isinstance(model := fields.get(option), str):
            from shoal.training.tracking import is_model_path

            if is_model_path(model):
                found.append((option, model))
    if isinstance(script, str | os.PathLike) and not is_name(script):
        found.append(("train_func", os.fspath(script)))
    for option, path in found:
        if option.endswith("paths") and has_credentials(_TEMPLATE.sub("x", path)):
            refuse_credentials(path)
        if path and is_relative(path) and not path.startswith(_TEMPLATE_MARKS):
            raise InvalidArgumentError(
                f'{option} is the relative path "{path}", but the working folder of an Airflow task is arbitrary: '
                "write an absolute path or a URI, or build the path from the DAG file's folder, as in "
                f'f"{{Path(__file__).parent}}/{path}"'
            )


def named_connections(value: Any) -> Iterator[tuple[str, str]]:
    """Yield each database connection and storage that a spec or dataset names, as far as the names are known: the
    prefix of its environment variable, and its name."""
    value = value.to_spec() if hasattr(value, "to_spec") else value
    value = value.model_dump() if isinstance(value, BaseModel) else value
    if isinstance(value, list | tuple):
        for item in value:
            yield from named_connections(item)
    elif isinstance(value, Mapping):
        if value.get("sql") and isinstance(name := value.get("connection"), str) and is_known(name):
            yield CONNECTION_PREFIX, name
        if isinstance(paths := value.get("paths"), list | tuple):
            found = (split_storage(path)[0] for path in paths if isinstance(path, str))
            named = {name: None for name in (value.get("storage"), *found) if isinstance(name, str) and is_known(name)}
            yield from ((STORAGE_PREFIX, name) for name in named)
        for option, item in value.items():
            if option not in _USERS_OWN:
                yield from named_connections(item)


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


def check_in_dag(task: BaseOperator | MappedOperator) -> None:
    """Check the arguments of a task that concern other tasks of its DAG.

    :param task: Task in a complete DAG.
    :raises InvalidArgumentError: A template cannot be parsed, or pulls the result of a task that does not exist or does
        not run before this task; `lease` names no such task; or `pool` names a compute pool of the DAG.
    """
    dag, arguments = task.get_dag(), arguments_of(task)
    if dag is None:
        return
    before, environment = task.get_flat_relative_ids(upstream=True) | {task.task_id}, dag.get_template_env()
    named = [("lease names", arguments["lease"])] if arguments.get("lease") else []
    mapped = task.expand_input.value if isinstance(task, MappedOperator) else None
    for text in _texts([*map(arguments.get, task.template_fields), mapped]):
        if is_known(text):
            continue
        try:
            template = environment.parse(text)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidArgumentError(
                f"task {task.task_id}: the template {shown(redact(text))} cannot be parsed: {error.message}"
            ) from None
        named += [("a template pulls the result of", task_id) for task_id in _results_of(template)]
    for use, task_id in named:
        if task_id not in before:
            problem = f"does not run before this task: write {task_id} >> {task.task_id}"
            if task_id not in dag.task_dict:
                near = difflib.get_close_matches(task_id, dag.task_dict, n=1)
                problem = "does not exist: " + (f"did you mean {near[0]}?" if near else "name a task of this DAG")
            raise InvalidArgumentError(f"task {task.task_id}: {use} task {task_id}, which {problem}")
    slots = arguments.get("pool")
    if slots != "default_pool":  # that of tasks without this argument
        pools = {pool_of(arguments_of(one)) for one in dag.tasks if is_a(one, PoolOperator)}
        check_slots(slots, () if pool_of(arguments) else pools, f"task {task.task_id}: ")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


_OF_OTHER_RUNS = {"dag_id", "run_id", "include_prior_dates"}
"""Arguments of ``xcom_pull`` that choose another run."""


def _results_of(template: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the ids of the tasks of the same run whose results a template pulls, as far as it contains the ids."""
    for call in template.find_all(jinja2.nodes.Call):
        options = {option.key: option.value for option in call.kwargs}
        named = call.args[0] if call.args else options.get("task_ids")
        is_pull = isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr == "xcom_pull"
        if not is_pull or named is None or len(call.args) > 1 or options.keys() & _OF_OTHER_RUNS:
            continue
        with suppress(jinja2.nodes.Impossible):
            ids = named.as_const()
            found = ids if isinstance(ids, list | tuple) else [ids]
            yield from (each for each in found if isinstance(each, str))


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
    "max_failed",
    "train",
    "space",
    "trials",
)
"""Arguments of operators that say what a job does."""

_OF_MAPPED = ("expand_input", "op_kwargs_expand_input", "python_callable")
"""Attributes of a mapped task that say the same. Only those of decorated functions have the last two."""


def digest_as_written(operator: BaseOperator) -> str:
    """Return the digest of a task's framework, of its function's code, and of its arguments before Airflow renders
    templates and maps values.

    :param operator: Operator of the task, whose templates may be rendered already.
    """
    # Airflow renders a copy of the DAG's task.
    dag = operator.get_dag()
    task = operator if dag is None else dag.task_dict[operator.task_id]
    arguments = arguments_of(task)
    # Only operators without a spec have `plan_for`: it does not change the digests of jobs of other versions of shoal.
    plan_for = {"plan_for": arguments["plan_for"]} if "plan_for" in arguments else {}
    written: dict[str, Any] = {name: arguments.get(name) for name in _ARGUMENTS} | plan_for
    script = written["train_func"]
    if isinstance(script, str | os.PathLike) and is_known(script) and not is_name(script):
        written["train_func"] = Script.read(script).text
    if isinstance(task, MappedOperator):
        written["mapped"] = [getattr(task, name, None) for name in _OF_MAPPED]
    parts_of_dag = XComArg | BaseOperator | MappedOperator | TaskGroup | DAG
    return code_digest(written, lambda value: repr(value) if isinstance(value, parts_of_dag) else None)


class CheckedOperator(BaseOperator):
    """Base class of operators whose arguments are checked while Airflow loads the DAG, as far as they are known then.

    The constructor of a subclass calls `check` when the constructor has set all attributes.
    """

    @classmethod
    @abstractmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the operator's arguments, except those whose values are known only at runtime.

        :raises InvalidArgumentError: An argument is wrong.
        """

    @classmethod
    def check(cls, task_id: str, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a task, except those that are not known yet.

        :param arguments: Arguments of the constructor. Missing arguments are not known yet.
        :raises InvalidArgumentError: An argument is wrong.
        :raises AirflowFailException: An argument is wrong, and this code runs in a task, where Airflow creates the
            instances of a mapped task.
        """
        try:
            cls.check_arguments(Arguments(arguments))
        except InvalidArgumentError as error:
            message = f"task {task_id}: {error}"
            if is_in_task():
                raise AirflowFailException(message) from error
            raise InvalidArgumentError(message) from None

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template as Airflow does, with two differences.

        Airflow does not show texts with credentials, such as the path of a dataset, in its logs and rendered templates.

        In DAGs with ``render_template_as_native_obj``, Airflow evaluates each text as Python code, also texts without
        templates: ``"12e45678"`` becomes inf, and ``"2013_01"`` becomes 201301. Here, a template of one expression
        gives the value of the expression in its own type, and everything else is a text. The types of a spec's fields
        decide which texts are numbers.
        """
        environment = jinja_env or self.get_template_env()
        if isinstance(content, str) and isinstance(environment, NativeEnvironment):
            template = environment.from_string(content)
            parts: list[Any] = list(template.root_render_func(template.new_context(dict(context))))
            is_text = len(parts) != 1 or getattr(self, "render_template_as_native_obj", None) is False
            rendered = "".join(map(str, parts)) if is_text or isinstance(parts[0], jinja2.Undefined) else parts[0]
        else:
            rendered = super().render_template(content, context, environment, seen_oids)
        for text in filter(has_credentials, _texts(rendered)):
            mask_secret(text)
        return rendered

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, and return Airflow's object for such
        arguments. The methods `expand` and `expand_kwargs` of this object check the arguments of each instance."""
        cls.check(task_id, kwargs)
        plain = super().partial(task_id=task_id, **kwargs)
        # Airflow warns about an object whose `expand` is never called. The user calls `expand` of the returned object,
        # and never of `plain`.
        plain._expand_called = True
        return _CheckedPartial(operator_class=cls, kwargs=plain.kwargs, params=plain.params)


class _CheckedPartial(OperatorPartial):
    """Arguments that all instances of a mapped task share. `expand` and `expand_kwargs` add the mapped values, and
    check those that are known."""

    def expand(self, **mapped_kwargs: Any) -> MappedOperator:
        """Return the mapped task, with one instance for each combination of the values.

        :param mapped_kwargs: For each argument, its values: a list or a dict, or the result of another task.
        """
        task = _checked_in_dag(super().expand(**mapped_kwargs))
        # The result of another task counts as a single unknown value.
        values = [
            [(f"{name}[{i}]", one) for i, one in enumerate(given.items() if isinstance(given, Mapping) else given)]
            if isinstance(given, Sequence | Mapping)
            else [("", given)]
            for name, given in mapped_kwargs.items()
        ]
        for chosen in product(*values):
            _check_instance(
                task,
                ", ".join(filter(None, (source for source, _ in chosen))),
                dict(zip(mapped_kwargs, (one for _, one in chosen), strict=True)),
            )
        return task

    def expand_kwargs(self, kwargs: Any, *, strict: bool = True) -> MappedOperator:
        """Return the mapped task, with one instance for each dict of arguments.

        :param kwargs: List of dicts, or the result of another task.
        :param strict: Whether an argument that `partial` has taken already is an error.
        """
        task = _checked_in_dag(super().expand_kwargs(kwargs, strict=strict))
        for i, one in enumerate(kwargs if isinstance(kwargs, Sequence) else ()):
            if isinstance(one, Mapping):
                _check_instance(task, f"item {i}", one)
        return task


def _checked_in_dag(task: MappedOperator) -> MappedOperator:
    """Let Airflow check the arguments that concern other tasks when the DAG is complete (see `PoolOperator`)."""
    if is_a(task, PoolOperator):
        vars(task)["prepare_template"] = partial(check_in_dag, task)
    return task


def _check_instance(task: MappedOperator, source: str, arguments: Mapping[str, Any]) -> None:
    """Check an instance of a mapped task by creating it in the same way as Airflow does when the instance runs.

    :param source: Text that names the mapped values in the error message. Empty: none of them is known.
    :raises InvalidArgumentError: An argument of the instance is wrong.
    """
    if source:
        try:
            task.unmap(arguments)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{error} (in the mapped values, at {source})") from None


def is_in_task() -> bool:
    """Return whether this code runs in an Airflow task, which can read the store, and not while Airflow loads a DAG."""
    try:
        get_current_context()
    except RuntimeError:
        return False
    return True


class LabelledOperator(CheckedOperator):
    """Base class of operators whose mapped instances Airflow shows with what each instance is about."""

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, as in `CheckedOperator.partial`. By
        default, Airflow shows each instance with what it is about (see `instance_label`)."""
        return super().partial(task_id=task_id, **{"map_index_template": "{{ task.instance_label }}", **kwargs})

    @property
    def instance_label(self) -> str:
        """The map index and what the instance is about, as far as this is known, such as ``3 delays-UA``. The property
        never raises, because Airflow would fail the task."""
        # The text is never a number alone. In a DAG with render_template_as_native_obj, Airflow would convert it to an
        # int, and fail the task.
        label = self.task_id
        with suppress(Exception):
            label = self.job_label
            return f"{get_current_context()['ti'].map_index} {label}"
        return label

    @property
    def job_label(self) -> str:
        """What the instance is about, from the operator's rendered arguments."""
        return self.task_id


class TaskKilledError(AirflowException):
    """Raised in a task that Airflow ends, because the task was cleared or marked as success or failed, its DAG run was
    deleted, or its worker was shut down."""


class PoolOperator(CheckedOperator):
    """Base class of operators on a compute pool.

    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool`` that defines the pool. Pass at most one of
        `compute_pool_conn_id` and `pool_name`. (templated)
    :param lease: Id of the task that leases the nodes. In a DAG with several leases, this argument selects the lease
        that the task uses. ``pool_for_run`` sets the argument for the tasks of its block.
    """

    template_fields: Sequence[str] = ("pool_name", "compute_pool_conn_id")
    ui_color = "#d9ecf2"

    def __init__(
        self,
        *,
        pool_name: str | None = None,
        compute_pool_conn_id: str | None = None,
        lease: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pool_name = pool_name
        self.compute_pool_conn_id = compute_pool_conn_id
        self.lease = lease
        self.is_killed = False
        self._last_logged = ""

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check that the arguments select the pool only once, by a correct name or URI, as far as the arguments are
        known."""
        check_pool(arguments)

    def prepare_template(self) -> None:
        """Check the arguments that concern other tasks. Airflow calls this method when the DAG is complete."""
        super().prepare_template()
        check_in_dag(self)

    @property
    def hook(self) -> ComputePoolHook:
        """Return a hook for the pool that the operator's arguments select."""
        return ComputePoolHook(self.compute_pool_conn_id, self.pool_name)

    def holder_in(self, context: Context) -> str:
        """Return the name of the holder to which this task's lease and jobs belong (see `holder_of`)."""
        return holder_of(context, self.lease)

    def pool_in(self, context: Context, hook: ComputePoolHook | None = None) -> ComputePool:
        """Return a client of the pool, for the holder and the team of this task.

        :param hook: Hook of the pool. By default, a new one, which reads the connection from Airflow.
        """
        hook = hook or self.hook
        return hook.pool(self.holder_in(context), team=team_of(context, hook.team, self.owner))

    def _defer_to_pool(self, pool: ComputePool, deadline: float, kwargs: dict[str, Any], **awaited: Any) -> None:
        """Defer the task until nodes of a pool are ready or a request has ended; `execute_complete` then gets `kwargs`.

        :param deadline: Time at which the wait ends in any case, in seconds since the epoch.
        :param awaited: The other fields of the `PoolTrigger`.
        """
        from shoal.airflow.triggers import PoolTrigger

        trigger = PoolTrigger(pool=pool.name, holder=pool.holder, deadline=deadline, **awaited)
        self.defer(trigger=trigger, method_name="execute_complete", kwargs=kwargs)

    def setup_advice(self, context: Context) -> str:
        """Return advice for an error about a pool on which the DAG run has no nodes any more: which task leases them.
        If only this task is cleared, that task does not run again."""
        run = context["dag_run"]
        if is_single_task_test(context):
            return (
                f"`airflow tasks test` does not run the task {self.lease}, which leases the nodes: first start the "
                f"pool with `shoal pool up`, or run the whole DAG with `airflow dags test {run.dag_id}`"
            )
        return (
            f"In this run, the task {self.lease} leases the nodes: clear it, too. `shoal train-again {run.dag_id} "
            f"{run.run_id}` clears all that is needed to train again what failed"
        )

    def pre_execute(self, context: Context) -> None:
        """Record the web address of this Airflow in shoal's store, and warn if another Airflow has the same id. Airflow
        calls this method before `execute`."""
        # `execute` needs the store and the id, too, and raises the error.
        with suppress(ShoalError):
            warn_of_copies()

    def on_kill(self) -> None:
        """Set a flag, so that `execute` rolls back its work and ends. Airflow allows 5 seconds for the rollback."""
        # Airflow calls this method in a signal handler, possibly in the middle of a transaction. An exception from this
        # method would leave the store locked. So this method only sets a flag. `execute` checks the flag at points
        # where `execute` can safely end.
        self.is_killed = True

    def end_if_killed(self) -> None:
        """Raise TaskKilledError if Airflow has called `on_kill`.

        Call this method only where an exception cannot interrupt unfinished work, such as a transaction.
        """
        if self.is_killed:
            raise TaskKilledError(
                f"Airflow has ended task {self.task_id}: the task was cleared or marked as success or failed, its DAG "
                "run was deleted, or its worker was shut down"
            )

    def log_progress(self, status: PoolStatus, holder: str | None = None) -> None:
        """Log the progress of the pool if the progress has changed. Raise TaskKilledError if Airflow has killed the
        task.

        Operators pass this method as `on_progress` to the pool's methods that wait for nodes.

        :param holder: Name of the holder whose lease the task waits for. If this lease is in the queue, the lease's
            place is logged, too.
        """
        self.end_if_killed()
        text = f"pool {status.name}: {status.progress(holder)}"
        if text != self._last_logged:
            self.log.info(text)
        self._last_logged = text


POLL_INTERVAL_S = 5.0
"""Default of `poll_interval`. The trigger notices the end of a wait after at most `poll_interval` seconds. Airflow then
needs more than 5 s to start the process in which the deferred task continues."""


def is_deferrable(given: bool | None) -> bool:
    """Return an operator's argument `deferrable` or, if it is None, Airflow's setting ``[operators]
    default_deferrable``."""
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False)) if given is None else given


class WorkerLostError(AirflowException):
    """Raised in a task whose worker was killed. The job goes on, and Airflow's next try of the task attaches to the
    job."""


def end_if_worker_is_lost() -> None:
    """Raise WorkerLostError if the worker's process that supervises this task was killed.

    The task's own process survives the loss of its worker, but can no longer send a result to Airflow.
    """
    from airflow.sdk.execution_time import task_runner

    # In `dag.test()`, there is no supervising process, and so no connection to one.
    connection = getattr(getattr(task_runner, "SUPERVISOR_COMMS", None), "socket", None)
    if connection is None:
        return
    try:
        is_lost = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        is_lost = False
    except OSError:
        is_lost = True
    if is_lost:
        raise WorkerLostError(
            "the task's worker was killed: the job goes on, and Airflow's next try of the task attaches to the job"
        )


class WaitingOperator(PoolOperator):
    """Base class of operators that wait.

    :param deferrable: Whether the task waits in Airflow's triggerer, where it takes no slot of a worker. By default,
        Airflow's setting ``[operators] default_deferrable`` decides.
    :param poll_interval: Seconds between two checks of the store while the task is deferred.
    :param wait_for_completion: Whether the task waits. False: the task ends when its request or job is submitted.
    :param credential_conn_ids: Ids of connections whose credentials the task's job gets, for storage and MLflow (see
        `shoal.airflow.hooks`). They are read when the job is submitted, and neither stored nor rendered.
    """

    def __init__(
        self,
        *,
        deferrable: bool | None = None,
        poll_interval: float = POLL_INTERVAL_S,
        wait_for_completion: bool = True,
        credential_conn_ids: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deferrable = is_deferrable(deferrable)
        self.poll_interval = poll_interval
        self.wait_for_completion = wait_for_completion
        self.credential_conn_ids = credential_conn_ids

    def submission(self, context: Context, hook: ComputePoolHook, **of_try: Any) -> dict[str, Any]:
        """Return the arguments with which this try of the task submits its job.

        :param hook: Hook of the job's pool.
        :param of_try: Further fields of the try, by which a later try finds the job.
        """
        ti = context["ti"]
        # At first, `max_tries` is equal to `retries`. When a task is cleared, Airflow increases `max_tries` by the
        # number of tries so far.
        cleared = ti.max_tries - (self.retries or 0)
        # `cleared` is wrong if the task's `retries` was changed after the run began. If no earlier try has the number
        # `cleared`, 0 is used instead.
        task = jobs.TaskTry(task_key(ti), ti.try_number, cleared if 0 < cleared < ti.try_number else 0, **of_try)
        return {
            "holder": self.holder_in(context),
            "key": task.key,
            "task": task,
            "connection_url": database_url,
            "secret_of": secret_variable,
            "environment": environment_of(self.credential_conn_ids),
            "team": team_of(context, hook.team, self.owner),
        }

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, and how the task waits."""
        super().check_arguments(arguments)
        check_waits(arguments)
