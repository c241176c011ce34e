"""`@distributed`: a function that can be called here, or in every worker of a gang."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

from shoal.distributors import where
from shoal.errors import InvalidArgumentError
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.pytorch.scaling import (
    AnyScaling,
    PyTorchScalingConfig,
    SpreadScalingConfig,
    WorkerResourceConfig,
    fitting,
)
from shoal.training.run_config import RunConfig

P = ParamSpec("P")
T = TypeVar("T")


class DistributedFunction(Generic[P, T]):
    """A function that is called as ever, and in every worker of a gang by `.distributed`.

    Args:
        function: The function.
        num_workers: Number of workers.
        each: What each claims.
        remote: Whether the workers are on a pool, which grows for the call, or on this node.
        run_config: Where and under which limits to run.
    """

    def __init__(
        self,
        function: Callable[P, T],
        num_workers: int,
        each: WorkerResourceConfig,
        remote: bool,
        run_config: RunConfig,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._num_workers = num_workers
        self._each = each
        self._remote = remote
        self._run_config = run_config

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function here."""
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Calls the function in every worker, and waits for all.

        Returns:
            What each rank returned, by rank.

        Raises:
            InvalidArgumentError: If the function does not take the arguments, or something cannot be sent.
            CapacityError: If the nodes cannot hold the workers.
            ScaleError: If the pool could not grow; it is as it was.
            TrainingError: If a rank raised: the first to do so.
        """
        program = Program.of(self._function, args, kwargs).dumps()
        request = FunctionRequest(name=name_of(self._function), scaling=self._scaling(), run_config=self._run_config)
        with self._nodes():
            run = where.run_function if self._remote else where.run_function_here
            return list(run(request, program).results)

    def _scaling(self) -> AnyScaling:
        if self._remote:
            return SpreadScalingConfig(num_workers=self._num_workers, resource_requirements_per_worker=self._each)
        return PyTorchScalingConfig(num_workers_per_node=self._num_workers, resource_requirements_per_worker=self._each)

    def _nodes(self) -> AbstractContextManager[Any]:
        """The nodes that it takes, for as long as the call lasts."""
        if not self._remote or where.is_connected():
            return nullcontext()
        from shoal.pool.api import ComputePool

        pool = ComputePool(self._run_config.pool_name)
        [head, *_] = pool.get_nodes()
        per_node = fitting(head, self._each)
        if not per_node:
            raise InvalidArgumentError(
                f"a worker of {self._each.num_cpus} CPUs and {self._each.num_gpus} GPUs does not fit on a node of pool "
                f'"{pool.name}", which has {head["cpus"]} and {head["gpus"]}'
            )
        return pool.lease(math.ceil(self._num_workers / per_node))


def distributed(
    gpus: int = 0,
    num_workers: int | None = None,
    num_cpus: int = 1,
    remote: bool = False,
    run_config: RunConfig | None = None,
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Lets a function be called in every worker of a gang, as ``f.distributed(...)``; ``f(...)`` calls it here.

    Args:
        gpus: GPUs, of all workers together.
        num_workers: Number of workers; by default one per GPU, or one.
        num_cpus: CPUs that each worker claims.
        remote: Run on the pool that the one rule names, which is leased for the call, grows for it where it has to, and
            is restored after it; instead of on this node.
        run_config: Where and under which limits to run.

    Raises:
        InvalidArgumentError: If the GPUs cannot be divided evenly, or a number is wrong.

    Example:
        >>> from shoal.distributors import distributed
        >>> @distributed(num_workers=2, num_cpus=0)
        ... def double(number):
        ...     return number * 2
        >>> double(4), double.distributed(4)
        (8, [8, 8])
    """
    if callable(gpus):
        raise InvalidArgumentError("write @distributed() with parentheses")
    workers = num_workers if num_workers is not None else max(1, gpus)
    if workers < 1 or gpus < 0 or gpus % workers:
        raise InvalidArgumentError(f"gpus={gpus} cannot be divided among num_workers={workers}")
    each = WorkerResourceConfig(num_cpus=num_cpus, num_gpus=gpus // workers)

    def decorate(function: Callable[P, T]) -> DistributedFunction[P, T]:
        return DistributedFunction(function, workers, each, remote, run_config or RunConfig())

    return decorate
