"""`@distributed` and `@ray_launch`: a function that is called here, in every worker of a gang, or as a Ray driver."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from shoal.distributors import dispatch
from shoal.errors import InvalidArgumentError
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.pytorch.scaling import (
    AnyScaling,
    PyTorchScalingConfig,
    SpreadScalingConfig,
    WorkerResourceConfig,
    fitting,
    spread,
)
from shoal.training.run_config import RunConfig
from shoal.training.scaling import Node

P = ParamSpec("P")
T = TypeVar("T")

_CLAIMS_NOTHING = WorkerResourceConfig(num_cpus=0)


@dataclass(frozen=True)
class Site:
    """Where a decorated function runs.

    Args:
        claim: What has to be there: workers, and what each claims.
        remote: On a pool, which grows for the call, instead of on this node.
        run_config: Under which limits.
    """

    claim: SpreadScalingConfig
    remote: bool
    run_config: RunConfig

    def run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, scaling: AnyScaling, *, once: bool = False
    ) -> tuple[Any, ...]:
        """Calls a function in every worker, and waits for all; returns what each rank returned, by rank.

        Args:
            function: What to call.
            args: Its arguments.
            kwargs: Its arguments by name.
            scaling: The workers that call it.
            once: Whether what is claimed is for the function's own workers, and not for those that call it.
        """
        program = Program.of(function, args, kwargs).dumps()
        request = FunctionRequest(
            name=name_of(function),
            scaling_config=scaling,
            room_for=self.claim if once else None,
            run_config=self.run_config,
        )
        with self._nodes():
            run = dispatch.run_function if self.remote else dispatch.run_function_here
            return run(request, program).results

    def _nodes(self) -> AbstractContextManager[Any]:
        """The nodes that it takes, for as long as the call lasts."""
        if not self.remote or dispatch.is_connected():
            return nullcontext()
        from shoal.pool.api import ComputePool

        pool = ComputePool(self.run_config.pool_name)
        [head, *_] = pool.get_nodes()
        each = self.claim.resource_requirements_per_worker
        per_node = fitting(Node(name=head["name"], cpus=head["cpus"], gpus=head["gpus"]), each)
        if not per_node:
            raise InvalidArgumentError(
                f"a worker of {each.num_cpus} CPUs and {each.num_gpus} GPUs does not fit on a node of pool "
                f'"{pool.name}", which has {head["cpus"]} and {head["gpus"]}'
            )
        return pool.lease(math.ceil(self.claim.num_workers / per_node))


class _Decorated(Generic[P, T]):
    """A function that is called as ever.

    Args:
        function: The function.
        site: Where it runs otherwise.
    """

    def __init__(self, function: Callable[P, T], site: Site) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._site = site

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function here."""
        return self._function(*args, **kwargs)


class DistributedFunction(_Decorated[P, T]):
    """A function that is called as ever, and in every worker of a gang by `.distributed`."""

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
        claim = self._site.claim
        on_one_node = PyTorchScalingConfig(
            num_workers_per_node=claim.num_workers,
            resource_requirements_per_worker=claim.resource_requirements_per_worker,
        )
        return list(self._site.run(self._function, args, kwargs, claim if self._site.remote else on_one_node))


class LaunchedFunction(_Decorated[P, T]):
    """A function that is called as ever, and as a connected Ray driver by `.distributed`."""

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the function once on the pool, where it may use Ray as it likes: tasks, actors, Ray Train, Ray Tune.

        It claims nothing itself: all CPUs and GPUs are left to what it starts.

        Returns:
            What it returned.

        Raises:
            InvalidArgumentError: If the function does not take the arguments, or something cannot be sent.
            CapacityError: If the nodes have no room for what was asked for.
            ScaleError: If the pool could not grow; it is as it was.
            TrainingError: If it raised.
        """
        alone = SpreadScalingConfig(num_workers=1, resource_requirements_per_worker=_CLAIMS_NOTHING)
        result: T = self._site.run(self._function, args, kwargs, alone, once=True)[0]
        return result


def distributed(
    gpus: int = 0,
    num_workers: int | None = None,
    num_cpus: int = 1,
    gpu_type: str | None = None,
    remote: bool = False,
    run_config: RunConfig | None = None,
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Lets a function be called in every worker of a gang, as ``f.distributed(...)``; ``f(...)`` calls it here.

    Args:
        gpus: GPUs, of all workers together.
        num_workers: Number of workers; by default one per GPU, or one.
        num_cpus: CPUs that each worker claims.
        gpu_type: Type that the GPUs must be of, as Ray names it (``H100``).
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
    site = Site(spread(gpus, num_workers, num_cpus, gpu_type), remote, run_config or RunConfig())
    return lambda function: DistributedFunction(function, site)


def ray_launch(
    gpus: int = 0,
    num_workers: int | None = None,
    num_cpus: int = 1,
    gpu_type: str | None = None,
    remote: bool = False,
    run_config: RunConfig | None = None,
) -> Callable[[Callable[P, T]], LaunchedFunction[P, T]]:
    """Lets a function be called once as a connected Ray driver, as ``f.distributed(...)``; ``f(...)`` calls it here.

    Args:
        gpus: GPUs that the pool is leased for.
        num_workers: How many workers of the function's own, each of `num_cpus` and its share of `gpus`, the pool is
            leased for; by default one per GPU, or one.
        num_cpus: CPUs for each of them.
        gpu_type: Type that the GPUs must be of, as Ray names it (``H100``).
        remote: Run on the pool that the one rule names, which is leased for the call, grows for it where it has to, and
            is restored after it; instead of on this node.
        run_config: Where and under which limits to run.

    Raises:
        InvalidArgumentError: If the GPUs cannot be divided evenly, or a number is wrong.

    Example:
        >>> from shoal.distributors import ray_launch
        >>> @ray_launch(num_workers=2)
        ... def total(numbers):
        ...     import ray
        ...     return sum(ray.get([ray.remote(abs).remote(number) for number in numbers]))
        >>> total.distributed([1, -2, 3])
        6
    """
    if callable(gpus):
        raise InvalidArgumentError("write @ray_launch() with parentheses")
    site = Site(spread(gpus, num_workers, num_cpus, gpu_type), remote, run_config or RunConfig())
    return lambda function: LaunchedFunction(function, site)
