"""`@task.distributed`: a task whose function runs in every worker of a gang on a compute pool."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, task_decorator_factory

from shoal.airflow.operators import DistributedTrainOperator
from shoal.errors import InvalidArgumentError
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class DistributedDecoratedOperator(DecoratedOperator, DistributedTrainOperator):
    """A decorated function as the `train_func` of a job.

    :param num_workers: Number of workers, wherever the pool has room; by default one per GPU, or one.
    :param num_cpus: CPUs that each claims.
    :param gpus: GPUs, of all workers together.
    :param gpu_type: Type that the GPUs must be of, as Ray names it (``H100``).
    :param spec: Further fields of a `FunctionJobSpec`, such as ``dataset_map``, ``hyper_params``, ``run_config``; their
        values are templated.
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
        from shoal.training.pytorch.scaling import spread

        if not isinstance(spec, Mapping | None):
            raise InvalidArgumentError("spec of @task.distributed is a dict, whose values may be templated")
        if spec and "scaling_config" in spec:
            raise InvalidArgumentError(
                "@task.distributed takes num_workers, num_cpus and gpus instead of scaling_config"
            )
        scaling = spread(gpus, num_workers, num_cpus, gpu_type)
        upstream = {
            "train_func": python_callable,
            "op_args": op_args,
            "op_kwargs": op_kwargs,
            "spec": {**(spec or {}), "scaling_config": scaling.model_dump()},
        }
        super().__init__(
            python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, kwargs_to_upstream=upstream, **kwargs
        )

    def execute(self, context: Context) -> Any:
        """Submit or attach, and wait. Returns what each rank returned, by rank."""
        from shoal.jobs import load_results

        self.op_kwargs = {**self._from_context(context), **self.op_kwargs}
        assert isinstance(self.spec, Mapping)
        location = RunConfig.model_validate(self.spec.get("run_config") or {}).artifact_location
        return self._handle_output(list(load_results(self.train(context), location).results))

    def _from_context(self, context: Context) -> Mapping[str, Any]:
        """What the function asks for of the run by the names that Airflow gives it, such as ``run_id``."""
        return {
            name: value for name, value in context.items() if name in inspect.signature(self.python_callable).parameters
        }


def distributed_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Makes a task of a function that runs in every worker of a gang; ``@task.distributed`` in a DAG.

    The task returns what each rank returned, by rank, which has to be what an XCom can hold. Its pool is leased around
    it, by ``pool_for_run``.

    :param python_callable: The function.
    :param kwargs: As of :class:`DistributedDecoratedOperator` and any operator: ``num_workers``, ``pool_name``.
    """
    if kwargs.pop("multiple_outputs", False):
        raise InvalidArgumentError("@task.distributed returns a list, which multiple_outputs=True cannot unpack")
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=False,  # what a function returns may be a dict, but what the task returns is a list of them
        decorated_operator_class=DistributedDecoratedOperator,
        **kwargs,
    )
