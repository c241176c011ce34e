"""Provide `TorchDistributor`, which has the interface of PySpark's `TorchDistributor`, but trains with shoal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.distributors import dispatch
from shoal.distributors.call_values import value_of
from shoal.errors import InvalidArgumentError
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.pytorch.scaling import (
    AnyScaling,
    PyTorchScalingConfig,
    SpreadScalingConfig,
    WorkerResourceConfig,
)
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors.call_values import Response, Returns
    from shoal.distributors.dispatch import Call
    from shoal.distributors.submitted_call import SubmittedCall


class TorchDistributor:
    """Object that runs a function or a script in several processes, and returns the return value of rank 0.

    Args:
        num_processes: Number of processes. If `local_mode` and `use_gpu` are both True and the node has too few GPUs
            for the processes, the number of processes is reduced to fit the GPUs, with a warning.
        local_mode: Whether to run all processes on one node instead of spreading them over the pool.
        use_gpu: Whether each process gets GPUs; pass False on nodes without GPUs.
        gpus_per_process: Number of GPUs that each process reserves. In Spark, the setting
            `spark.task.resource.gpu.amount` is this number. More than 1 requires ``use_gpu=True``.
        run_config: Pool and limits of the run.

    Raises:
        InvalidArgumentError: `num_processes` or `gpus_per_process` is not a positive whole number, or
            `gpus_per_process` is more than 1 without `use_gpu`.

    Example:
        >>> from shoal.distributors.pytorch import TorchDistributor
        >>> def train(rate):
        ...     return rate * 2
        >>> TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, 0.1)
        0.2
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        *,
        gpus_per_process: int = 1,
        run_config: RunConfig | None = None,
    ) -> None:
        for name, value in (("num_processes", num_processes), ("gpus_per_process", gpus_per_process)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{name} must be a positive whole number, not {value!r}")
        if gpus_per_process > 1 and not use_gpu:
            raise InvalidArgumentError(
                f"gpus_per_process={gpus_per_process} requires use_gpu=True: pass use_gpu=True, or remove "
                "gpus_per_process"
            )
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self.gpus_per_process = gpus_per_process
        self.run_config = run_config or RunConfig()

    def run(self, main: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script in all processes, and wait until all processes have ended.

        Args:
            main: The function, or the path of a script.
            args: Positional arguments of the function, or command-line arguments of the script.
            kwargs: Keyword arguments of the function.

        Returns:
            The value that the function has returned on rank 0; None for a script.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, or cannot be pickled with them.
            CapacityError: The active nodes have no room for the processes.
            TrainingError: A rank raised an exception; the error describes the first one, and its notes contain the
                traceback of each rank that failed.
            JobFailedError: The call ran as a job on a pool, and the job failed, for whatever reason. The error is a
                TrainingError, too. Its message ends with the cause, and its notes contain the traceback of each rank
                that failed.
            JobCancelledError: The call ran as a job on a pool, and the job was cancelled.
        """
        response: Response = self._call(main, args, kwargs).run()
        return value_of(response.result, 0)

    def submit(
        self, main: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> SubmittedCall[Any]:
        """Run a function or a script in all processes as a job, and return without waiting for the job.

        The job goes on when this process ends. The arguments are those of `run`.

        Returns:
            Handle of the call, whose ``result()`` returns the same as `run`.

        Raises:
            InvalidArgumentError: An argument is not legal, as in `run`; or this process is connected to a Ray cluster,
                where calls do not run as jobs.
        """
        return self._call(main, args, kwargs, returns="rank-0").submit()

    def _call(
        self,
        main: Callable[..., Any] | str | os.PathLike[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        returns: Returns = None,
    ) -> Call[Any]:
        program = Program.of(main, args, kwargs)
        config = self.run_config
        if self.local_mode and self.use_gpu:
            config = config.model_copy(update={"clamp": True})
        request = FunctionRequest(
            name=name_of(program.target),
            scaling_config=self._scaling(),
            torch_distributor="local" if self.local_mode else "distributed",
            run_config=config,
        )
        return dispatch.function(request, program.dumps(), returns=returns)

    def _scaling(self) -> AnyScaling:
        gpus = self.gpus_per_process if self.use_gpu else 0
        if not self.local_mode:
            each = WorkerResourceConfig(num_cpus=1, num_gpus=gpus)
            return SpreadScalingConfig(num_workers=self.num_processes, resource_requirements_per_worker=each)
        # The processes reserve no CPUs, so that all processes share the machine's CPUs, as in PySpark's local mode.
        each = WorkerResourceConfig(num_cpus=0, num_gpus=gpus)
        return PyTorchScalingConfig(num_workers_per_node=self.num_processes, resource_requirements_per_worker=each)
