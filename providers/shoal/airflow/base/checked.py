"""Base classes of operators whose arguments are checked while Airflow loads the DAG, and of those whose mapped
instances Airflow shows with a name, such as that of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import jinja2
from airflow.sdk import BaseOperator, get_current_context
from airflow.sdk.definitions.mappedoperator import MappedOperator, OperatorPartial
from airflow.sdk.exceptions import AirflowFailException
from jinja2.nativetypes import NativeEnvironment

from shoal.airflow.checks import Arguments
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class CheckedOperator(BaseOperator):
    """Base class of operators whose arguments are checked while Airflow loads the DAG, as far as they are known then.

    The constructor of a subclass calls `check` when the constructor has set all attributes.
    """

    @classmethod
    @abstractmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the operator's arguments, except those whose values are known only at runtime.

        :param arguments: Arguments of the constructor.
        :raises InvalidArgumentError: An argument is wrong.
        """

    @classmethod
    def check(cls, task_id: str, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a task, except those that are not known yet.

        :param task_id: Id of the task, for the message.
        :param arguments: Arguments of the constructor. Missing arguments are not known yet.
        :raises InvalidArgumentError: An argument is wrong.
        :raises AirflowFailException: An argument is wrong, and this code runs in a task, where Airflow creates the
            instances of a mapped task.
        """
        in_task = is_in_task()
        try:
            cls.check_arguments(Arguments(arguments, in_task=in_task))
        except InvalidArgumentError as error:
            message = f"task {task_id}: {error}"
            if in_task:
                raise AirflowFailException(message) from error
            raise InvalidArgumentError(message) from None

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template as Airflow does, with one difference in DAGs with ``render_template_as_native_obj``.

        There, Airflow evaluates each text as Python code, also texts without templates: ``"12e45678"`` becomes inf, and
        ``"2013_01"`` becomes 201301. Here, a template of one expression gives the value of the expression in its own
        type, and everything else is a text. The types of a spec's fields decide which texts are numbers.

        :param content: Text, or a collection with texts.
        :param context: Airflow's context of the task.
        :param jinja_env: Environment that renders.
        :param seen_oids: Ids of the collections that were rendered.
        """
        environment = jinja_env or self.get_template_env()
        if not isinstance(content, str) or not isinstance(environment, NativeEnvironment):
            return super().render_template(content, context, environment, seen_oids)
        template = environment.from_string(content)
        parts: list[Any] = list(template.root_render_func(template.new_context(dict(context))))
        is_text = len(parts) != 1 or getattr(self, "render_template_as_native_obj", None) is False
        return "".join(map(str, parts)) if is_text or isinstance(parts[0], jinja2.Undefined) else parts[0]

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, and return Airflow's object for such
        arguments. The methods `expand` and `expand_kwargs` of this object check the arguments of each instance.

        :param task_id: Id of the task.
        :param kwargs: Arguments that the instances have in common.
        """
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
        task = super().expand(**mapped_kwargs)
        _check_instances(task, _combinations(mapped_kwargs))
        return task

    def expand_kwargs(self, kwargs: Any, *, strict: bool = True) -> MappedOperator:
        """Return the mapped task, with one instance for each dict of arguments.

        :param kwargs: List of dicts, or the result of another task.
        :param strict: Whether an argument that `partial` has taken already is an error.
        """
        task = super().expand_kwargs(kwargs, strict=strict)
        given = kwargs if isinstance(kwargs, Sequence) else ()
        _check_instances(task, ((f"item {i}", one) for i, one in enumerate(given) if isinstance(one, Mapping)))
        return task


def _combinations(mapped: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the description and the arguments of each instance of a mapped task, in the order of the map indexes. Error
    messages contain the description, which names the mapped values. The result of another task counts as a single
    unknown value."""
    values = [
        [(f"{name}[{i}]", one) for i, one in enumerate(given.items() if isinstance(given, Mapping) else given)]
        if isinstance(given, Sequence | Mapping)
        else [("", given)]
        for name, given in mapped.items()
    ]
    for chosen in product(*values):
        yield (
            ", ".join(filter(None, (source for source, _ in chosen))),
            dict(zip(mapped, (one for _, one in chosen), strict=True)),
        )


def _check_instances(task: MappedOperator, instances: Iterator[tuple[str, Mapping[str, Any]]]) -> None:
    """Check the instances of a mapped task by creating each instance in the same way as Airflow does when the instance
    runs.

    :param task: The mapped task.
    :param instances: A pair for each instance: a text that names its mapped values for the error message, and its
        arguments.
    :raises InvalidArgumentError: An argument of an instance is wrong.
    """
    for source, arguments in instances:
        if source:
            try:
                task.unmap(arguments)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{error} (in the mapped values, at {source})") from None


def is_in_task() -> bool:
    """Return whether this code runs in an Airflow task."""
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
        default, Airflow shows each instance with what it is about (see `instance_label`).

        :param task_id: Id of the task.
        :param kwargs: Arguments that the instances have in common.
        """
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
