"""Provide the decorators `@task.distributed` and `@task.ray_launch`, which run a function on a compute pool.

`@task.distributed` runs the function in each process of a group of workers that start and end together.
`@task.ray_launch` runs the function once, in a process that is connected to Ray and may start Ray tasks and actors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory
from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS, Context

from shoal import jobs
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.operators.base import UNKNOWN, Arguments
from shoal.errors import InvalidArgumentError
from shoal.training.run_config import RunConfig

_ONLY_IN_THE_TASK = frozenset(
    {
        "asset_state_store", "conn", "dag", "dag_run", "exception", "inlet_events", "inlets", "macros", "outlet_events",
        "outlets", "task", "task_instance", "task_state_store", "ti", "triggering_asset_events", "var",
    }
)  # fmt: skip
"""Names of objects of Airflow, which only a process that runs a task can use."""


def refuse_objects_of_the_task(function: Callable[..., Any], given: Collection[str]) -> None:
    """Refuse a function with parameters to which Airflow would give objects that exist only in the task's process.

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
    without a date, is None."""
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


class DistributedDecoratedOperator(DecoratedOperator, DistributedTrainOperator):
    """Operator that submits the decorated function as the `train_func` of a job.

    :param num_workers: Number of workers, which may run on any nodes of the pool. By default, there is one worker per
        GPU, or one worker if `gpus` is 0.
    :param num_cpus: Number of CPUs per worker.
    :param gpus: Total number of GPUs of all workers.
    :param gpu_type: Type of GPU that the workers need, as Ray names it (for example ``H100``). By default, any type.
    :param spec: Further fields of a `FunctionJobSpec`, such as ``dataset_map``, ``hyper_params``, ``run_config``. The
        values of these fields are templated.
    """

    template_fields: Sequence[str] = DistributedTrainOperator.template_fields
    template_fields_renderers = DistributedTrainOperator.template_fields_renderers
    shallow_copy_attrs: Sequence[str] = ("python_callable", "train_func")
    custom_operator_name = "@task.distributed"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any],
        op_kwargs: Mapping[str, Any],
        num_workers: int | None = None,
        num_cpus: int = 1,
        gpus: int = 0,
        gpu_type: str | None = None,
        spec: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        upstream = {
            "train_func": python_callable,
            "op_args": op_args,
            "op_kwargs": op_kwargs,
            "spec": self.fields(spec, num_workers=num_workers, num_cpus=num_cpus, gpus=gpus, gpu_type=gpu_type),
        }
        super().__init__(
            python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, kwargs_to_upstream=upstream, **kwargs
        )

    @classmethod
    def fields(cls, spec: Any, **requested: Any) -> dict[str, Any]:
        """Return the fields of the job's spec: the user's fields, and the fields for the number and size of the
        workers.

        :param spec: Further fields of a `FunctionJobSpec`.
        :param requested: Those of the arguments `num_workers`, `num_cpus`, `gpus` and `gpu_type` that are known.
        """
        if not isinstance(spec, Mapping | None):
            raise InvalidArgumentError(
                f"spec of {cls.custom_operator_name} must be a dict (its values may be templated), not "
                f"{type(spec).__name__}"
            )
        if spec and "scaling_config" in spec:
            raise InvalidArgumentError(
                f"spec of {cls.custom_operator_name} must not contain scaling_config: use num_workers, num_cpus and "
                "gpus instead"
            )
        from shoal.training.pytorch.request import spread

        return {**(spec or {}), **cls.room(spread(**requested).model_dump())}

    @classmethod
    def room(cls, requested: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the job's spec that set the number and the size of the workers.

        :param requested: The `SpreadScalingConfig` of the operator's arguments, as a dict.
        """
        return {"scaling_config": requested}

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time, and the names of the function's parameters."""
        super().check_arguments(arguments)
        function, args, kwargs = (arguments[name] for name in ("train_func", "op_args", "op_kwargs"))
        if callable(function) and args is not UNKNOWN and isinstance(kwargs, Mapping):
            refuse_objects_of_the_task(function, _given(function, args, kwargs))

    def execute(self, context: Context) -> Any:
        """Submit the job (or attach to the job of an earlier try of this task), wait until the job ends, and return the
        value of the task."""
        return DistributedTrainOperator.execute(self, context)

    def job_spec(self, context: Context) -> jobs.AnyJobSpec:
        """Build the job's spec from the operator's arguments. Parameters of the decorated function that are named like
        values in Airflow's context, such as ``run_id``, get these values."""
        given = _given(self.python_callable, self.op_args, self.op_kwargs)
        values = context_values(self.python_callable, context)
        self.op_kwargs = {**{name: values[name] for name in values.keys() - given}, **self.op_kwargs}
        return super().job_spec(context)

    def value_of(self, result: jobs.JobResult) -> Any:
        """Return the function's return values from a job's result, as a list in the order of the workers' ranks."""
        return self._handle_output(self._values(result))

    def _values(self, result: jobs.JobResult) -> list[Any]:
        from shoal.jobs.results import strict
        from shoal.kinds.function.call import Response

        assert isinstance(self.spec, Mapping)
        location = RunConfig.model_validate(self.spec.get("run_config") or {}).artifact_location
        return [strict(value) for value in Response(jobs.load_results(result, location)).get_results()]


class RayLaunchDecoratedOperator(DistributedDecoratedOperator):
    """Operator that runs the decorated function once on a compute pool, in a process that is connected to Ray.

    The process of the function reserves no CPUs and no GPUs. The arguments say how many resources the Ray tasks and
    actors of the function need. The job waits until the pool has enough free resources for all of these tasks and
    actors.

    :param num_workers: Number of the function's own Ray tasks and actors. By default, one per GPU, or one if `gpus` is
        0.
    :param num_cpus: Number of CPUs per Ray task or actor.
    :param gpus: Total number of GPUs of all Ray tasks and actors.
    :param gpu_type: Type of GPU that the Ray tasks and actors need, as Ray names it (for example ``H100``). By default,
        any type.
    :param spec: Further fields of a `FunctionJobSpec`, such as ``dataset_map``, ``hyper_params``, ``run_config``. The
        values of these fields are templated.
    """

    custom_operator_name = "@task.ray_launch"

    @classmethod
    def room(cls, requested: dict[str, Any]) -> dict[str, Any]:
        """Return two fields of the job's spec: `scaling_config` and `room_for`.

        The field `scaling_config` describes the one worker, which calls the function and reserves no resources. The
        field `room_for` contains the resources that the function's own Ray tasks and actors need.

        :param requested: The `SpreadScalingConfig` of the operator's arguments, as a dict.
        """
        from shoal.training.pytorch.request import launched

        return {"scaling_config": launched().model_dump(), "room_for": requested}

    def value_of(self, result: jobs.JobResult) -> Any:
        """Return the function's return value from a job's result."""
        return self._handle_output(self._values(result)[0])


def _given(function: Callable[..., Any], args: Collection[Any], kwargs: Mapping[str, Any]) -> Collection[str]:
    """Return the names of those parameters of a function for which the user has given arguments."""
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments.keys()


def distributed_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Convert a function to an Airflow task that runs the function in each process of a group of workers
    (``@task.distributed``).

    The task returns a list of the function's return values, in the order of the workers' ranks. The values must be of
    types that an XCom can store; NaN and infinity become the texts "NaN" and "Infinity". The pool has to be up, so use
    the task inside a ``with pool_for_run(...)`` block.

    :param python_callable: The function.
    :param kwargs: Arguments of :class:`DistributedDecoratedOperator`, such as ``num_workers`` and ``pool_name``, and of
        Airflow's operators.
    """
    if kwargs.pop("multiple_outputs", False):
        raise InvalidArgumentError(
            "multiple_outputs=True is not allowed for @task.distributed, because the task returns a list: remove "
            "multiple_outputs"
        )
    # For a function that returns a dict, Airflow would set `multiple_outputs`. But this task returns a list with the
    # dict of each worker, which Airflow could not split into several outputs.
    return _decorated(DistributedDecoratedOperator, python_callable, multiple_outputs=False, **kwargs)


def ray_launch_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Convert a function to an Airflow task that runs the function once on a compute pool, in a process that is
    connected to Ray (``@task.ray_launch``).

    In the connected process, the function can use Ray tasks and actors, Ray Train and Ray Tune. The task returns the
    function's return value, which must be of a type that an XCom can store. The pool has to be up, so use the task
    inside a ``with pool_for_run(...)`` block.

    :param python_callable: The function.
    :param kwargs: Arguments of :class:`RayLaunchDecoratedOperator`, such as ``num_workers`` and ``pool_name``, and of
        Airflow's operators.
    """
    return _decorated(RayLaunchDecoratedOperator, python_callable, **kwargs)


def _decorated(
    operator: type[DistributedDecoratedOperator], function: Callable[..., Any] | None, **kwargs: Any
) -> TaskDecorator:
    # Airflow creates the operators of a mapped task only when its instances run. The check here reports wrong arguments
    # earlier, when Airflow loads the DAG.
    from shoal.training.pytorch.request import spread

    requested = {name: value for name, value in kwargs.items() if name in inspect.signature(spread).parameters}
    name = operator.custom_operator_name
    operator.check(
        str(kwargs.get("task_id") or getattr(function, "__name__", f"with {name}")),
        {**kwargs, "spec": operator.fields(kwargs.get("spec"), **requested), "train_func": function or _decorated},
    )
    return task_decorator_factory(python_callable=function, decorated_operator_class=operator, **kwargs)
