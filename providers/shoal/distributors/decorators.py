"""Provide the decorators `@distributed` (call in several workers) and `@ray_launch` (call once, with access to Ray).

A function with `@ray_launch` is called once, in a process from which it can start Ray tasks and actors itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from shoal.distributors.call import Call, SubmittedCall, packed, same_arguments
from shoal.distributors.call_pool import embedded_pool, pool_for
from shoal.errors import InvalidArgumentError
from shoal.jobs.kind import call_of
from shoal.jobs.spec import NOT_STORED
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.pool.backends.local.gpus import ALL, visible_gpus
from shoal.pool.spec import PoolSpec
from shoal.training.cluster import Node
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import (
    AnyScaling,
    SpreadScalingConfig,
    launched,
    nodes_needed,
    on_one_node,
    spread,
)
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.kinds.function.call import Returns

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """Settings that determine where a decorated function runs, and with which resources.

    Args:
        requested: Number of workers, and the resources that each of them reserves.
        remote: Whether the function runs on a pool, which grows for the call, instead of on this node.
        run_config: Pool and limits of the run.
        one_per_gpu: Whether a function that runs on this node, without a given number of GPUs, is called once for each
            GPU of the node. True if the user gave no number of workers.
    """

    requested: SpreadScalingConfig
    remote: bool
    run_config: RunConfig
    one_per_gpu: bool = False

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        scaling: AnyScaling,
        *,
        once: bool = False,
        returns: Returns = None,
    ) -> Call[Any]:
        """Return the `Call` object that runs a function in every worker.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them.
        """
        program = Program.of(function, args, kwargs)
        spec = FunctionJobSpec(
            name=name_of(function),
            scaling_config=scaling,
            room_for=self.requested if once else None,
            run_config=self.run_config,
            program=NOT_STORED,
            returns=returns,
        )
        content = packed(program, self.run_config) if self.remote else program.dumps()
        return Call(call_of(spec, content), pool=self._pool)

    def _pool(self, job_id: str | None) -> AbstractContextManager[str]:
        """Return a context manager that yields the name of a pool with as many nodes as the call needs.

        If the function runs on this node, or if there is no pool that the call could use, an embedded pool is used. In
        all other cases, nodes of an existing pool are leased. A pool that is named and down is started for the call.

        Raises:
            InvalidArgumentError: The function runs on this node, which has too few GPUs.
        """

        timeout_s = self.run_config.timeout
        each, workers = self.requested.resource_requirements_per_worker, self.requested.num_workers
        cpus, gpus = workers * each.num_cpus, workers * each.num_gpus
        if not self.remote:
            if gpus > 0 and not self.run_config.clamp and gpus > (found := len(visible_gpus(os.environ))):
                raise InvalidArgumentError(
                    f"the call needs {gpus} GPU{'' if gpus == 1 else 's'} of this machine, but {found} can be used: "
                    "pass remote=True to use the GPUs of a pool, or omit the number of GPUs to run on CPUs"
                )
            return embedded_pool(least_gpus=max(1, gpus), job_id=job_id, timeout_s=timeout_s)
        return pool_for(
            self.run_config.pool_name,
            lambda why: embedded_pool(cpus=cpus, gpus=gpus, job_id=job_id, timeout_s=timeout_s, why=why),
            size_on=self._size,
            leases_named=True,
            job_id=job_id,
        )

    def _size(self, spec: PoolSpec, active: Sequence[Node]) -> int:
        gpus = spec.gpus_per_node
        if gpus == ALL:
            # An active node has already claimed all GPUs of the machine, so a new node would have none. If no node is
            # active, a new node would get all GPUs. Counting the GPUs may take seconds, so they are counted only if the
            # workers need GPUs.
            wanted = self.requested.resource_requirements_per_worker.num_gpus
            gpus = len(visible_gpus(os.environ)) if wanted and not active else 0
        size = nodes_needed(self.requested, active, Node(name=spec.name, cpus=spec.cpus_per_node, gpus=gpus))
        if size is None:
            each = self.requested.resource_requirements_per_worker
            raise InvalidArgumentError(
                f"a worker of {each.num_cpus} CPUs and {each.num_gpus} GPUs does not fit on a node of pool "
                f'"{spec.name}": a node has {spec.cpus_per_node} CPUs and {gpus} GPUs; request fewer CPUs or GPUs for '
                "each worker, or change cpus_per_node and gpus_per_node of the pool"
            )
        return size


class Decorated(Generic[P, T]):
    """Base class of functions that were decorated with `@distributed` or `@ray_launch`.

    A plain call runs the function in this process.

    Args:
        function: The function that was decorated.
        site: Settings that determine where and with which resources `.distributed` runs the function.
    """

    def __init__(self, function: Callable[P, T], site: Site) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._site = site

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in this process, and return its result."""
        return self._function(*args, **kwargs)


class DistributedFunction(Decorated[P, T]):
    """Function that was decorated with `@distributed`.

    A call of `.distributed` runs the function in every worker of a group. A plain call runs the function in this
    process.
    """

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call the decorated function once in every worker, and wait until all calls have ended.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them.
            CapacityError: The nodes have no room for the workers.
            ScaleError: The pool could not be started or grow, and was restored to its previous state.
            TrainingError: A rank raised an exception; the error describes the first one, and its notes contain the
                traceback of each rank that failed.
            JobFailedError: The call ran as a job on a pool, and the job failed, for whatever reason. The error is a
                TrainingError, too. Its message ends with the cause, and its notes contain the traceback of each rank
                that failed.
            JobCancelledError: The call ran as a job on a pool, and the job was cancelled.
        """
        return cast("list[T]", self._call(args, kwargs).run().get_results())

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> SubmittedCall[list[T]]:
        """Call the decorated function once in every worker as a job, and return without waiting for the job.

        The job goes on when this process ends. Leased nodes, or an embedded pool, last as long as the job.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them; or this
                process is connected to a Ray cluster, where calls do not run as jobs.
            ScaleError: The pool could not be started or grow, and was restored to its previous state.
        """
        return self._call(args, kwargs, returns="ranks").submit()

    def _call(self, args: Any, kwargs: Any, returns: Returns = None) -> Call[Any]:
        requested = self._site.requested
        all_gpus = not requested.resource_requirements_per_worker.num_gpus
        here = on_one_node(requested, all_gpus=all_gpus, per_gpu=all_gpus and self._site.one_per_gpu)
        scaling = requested if self._site.remote else here
        return self._site.call(self._function, args, kwargs, scaling, returns=returns)


class LaunchedFunction(Decorated[P, T]):
    """Function that was decorated with `@ray_launch`.

    A call of `.distributed` runs the function once in a process that is connected to the pool's Ray cluster. A plain
    call runs the function in this process.
    """

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the decorated function once, in a process that is connected to Ray, so that the function can use Ray
        tasks and actors, Ray Train and Ray Tune.

        The process of the function reserves no CPUs and no GPUs, so that all of them are free for the tasks and actors
        that the function starts.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them.
            CapacityError: The nodes have no room for the requested workers.
            ScaleError: The pool could not be started or grow, and was restored to its previous state.
            TrainingError: The function raised an exception; the notes contain its traceback.
            JobFailedError: The call ran as a job on a pool, and the job failed, for whatever reason. The error is a
                TrainingError, too. Its message ends with the cause, and its notes contain the traceback of the
                function.
            JobCancelledError: The call ran as a job on a pool, and the job was cancelled.
        """
        return cast(T, self._call(args, kwargs).run().get_results()[0])

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> SubmittedCall[T]:
        """Call the decorated function once as a job (see `distributed`), and return without waiting for the job.

        The job goes on when this process ends. Leased nodes, or an embedded pool, last as long as the job.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them; or this
                process is connected to a Ray cluster, where calls do not run as jobs.
            ScaleError: The pool could not be started or grow, and was restored to its previous state.
        """
        return self._call(args, kwargs, returns="rank-0").submit()

    def _call(self, args: Any, kwargs: Any, returns: Returns = None) -> Call[Any]:
        return self._site.call(self._function, args, kwargs, launched(), once=True, returns=returns)


def distributed(
    gpus: int = 0,
    num_workers: int | None = None,
    num_cpus: int = 1,
    gpu_type: str | None = None,
    remote: bool = False,
    run_config: RunConfig | None = None,
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function `f`: ``f.distributed(...)`` calls `f` in several workers, and ``f(...)`` calls `f` in this
    process.

    ``f.submit(...)`` also calls `f` in several workers, but returns a handle instead of waiting for the results.

    Args:
        gpus: Number of GPUs of all workers together. 0: all GPUs of this node, if it has any; none with `remote`.
        num_workers: Number of workers; by default one worker per GPU, or one worker without GPUs.
        num_cpus: Number of CPUs that each worker reserves.
        gpu_type: Required type of the GPUs, by Ray's name for it, such as ``H100``.
        remote: Whether to run on a pool instead of on this node. The pool is the one in `run_config`, in
            ``$SHOAL_POOL``, or the only pool that is up. Nodes of the pool are leased for the call: the pool is started
            or grows if necessary, and gets its previous size afterwards. Without a pool, an embedded pool is used.
        run_config: Pool and limits of the run.

    Raises:
        InvalidArgumentError: The GPUs cannot be divided evenly among the workers, or a number is not legal.

    Example:
        >>> from shoal.distributors import distributed
        >>> @distributed(num_workers=2, num_cpus=0)
        ... def double(number):
        ...     return number * 2
        >>> double(4), double.distributed(4)
        (8, [8, 8])
    """
    chosen = site("distributed", **locals())
    return lambda function: DistributedFunction(function, chosen)


@same_arguments(distributed)
def ray_launch(**arguments: Any) -> Callable[[Callable[P, T]], LaunchedFunction[P, T]]:
    """Decorate a function `f` so that ``f.distributed(...)`` calls `f` once, in a process that is connected to Ray.

    A plain call ``f(...)`` still runs the function in this process. ``f.submit(...)`` returns a handle instead of
    waiting for the result. The arguments say how many resources the Ray tasks and actors of the function need.

    Args:
        gpus: Number of GPUs that the function's own tasks and actors need together.
        num_workers: Number of the function's own tasks and actors, each with `num_cpus` CPUs and an equal share of
            `gpus`; by default one per GPU, or one if `gpus` is 0. The leased nodes have enough resources for all these
            tasks and actors.
        num_cpus: Number of CPUs for each of the tasks and actors.
        gpu_type: Required type of the GPUs, by Ray's name for it, such as ``H100``.
        remote: Whether to run on a pool instead of on this node. The pool is the one in `run_config`, in
            ``$SHOAL_POOL``, or the only pool that is up. Nodes of the pool are leased for the call: the pool is started
            or grows if necessary, and gets its previous size afterwards. Without a pool, an embedded pool is used.
        run_config: Pool and limits of the run.

    Raises:
        InvalidArgumentError: The GPUs cannot be divided evenly among the workers, or a number is not legal.

    Example:
        >>> from shoal.distributors import ray_launch
        >>> @ray_launch(num_workers=2)
        ... def total(numbers):
        ...     import ray
        ...     return sum(ray.get([ray.remote(abs).remote(number) for number in numbers]))
        >>> total.distributed([1, -2, 3])
        6
    """
    chosen = site("ray_launch", **arguments)
    return lambda function: LaunchedFunction(function, chosen)


def site(decorator: str, remote: bool, run_config: RunConfig | None, **requested: Any) -> Site:
    """Return the settings of a decorated function from the arguments of its decorator.

    Raises:
        InvalidArgumentError: The decorator was written without parentheses, or an argument is not legal.
    """
    if callable(requested["gpus"]):
        raise InvalidArgumentError(f"@{decorator} needs parentheses: write @{decorator}()")
    one_per_gpu = requested["num_workers"] is None
    return Site(spread(**requested), remote, run_config or RunConfig(), one_per_gpu=one_per_gpu)
