"""Provide `PyTorchDistributor` and `TorchDistributor`, which run a function or script in several processes (ranks)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from shoal.data.connector import DataConnector
from shoal.distributors.call import Call, SubmittedCall, packed, same_arguments
from shoal.errors import InvalidArgumentError
from shoal.jobs.kind import call_of
from shoal.jobs.spec import NOT_STORED
from shoal.kinds.function.call import Response as Response
from shoal.kinds.function.call import Returns, value_of
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.training.locations import resolved
from shoal.training.pytorch.context import Context as Context
from shoal.training.pytorch.context import get_context as get_context
from shoal.training.pytorch.program import Program, check_runnable, name_of
from shoal.training.pytorch.request import AnyScaling, SpreadScalingConfig
from shoal.training.pytorch.request import PyTorchScalingConfig as PyTorchScalingConfig
from shoal.training.pytorch.request import WorkerResourceConfig as WorkerResourceConfig
from shoal.training.pytorch.worker import run_local as run_local
from shoal.training.run_config import RunConfig


class PyTorchDistributor:
    """Object that runs a function or a script on all ranks (worker processes) of a distributed training.

    Every rank gets the environment variables that torchrun sets, so that DDP, FSDP2, Fabric, Accelerate, DeepSpeed and
    Transformers' `Trainer` work without changes.

    Args:
        train_func: The function, or the path of a script. The code itself is sent to the workers, so that it need not
            be installed on the nodes; a function is sent together with the variables that it closes over.
        scaling_config: Number of nodes, workers per node, and resources of each worker; by default one worker with one
            CPU.
        run_config: Pool and limits of the run.

    Raises:
        InvalidArgumentError: `train_func` is neither a function nor a path.

    Example:
        >>> from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, get_context
        >>> def train():
        ...     return get_context().get_rank()
        >>> PyTorchDistributor(train, PyTorchScalingConfig(num_nodes=2)).run().get_results()
        [0, 1]
    """

    _default_scaling: ClassVar = PyTorchScalingConfig()

    def __init__(
        self,
        train_func: Callable[..., Any] | str | os.PathLike[str],
        scaling_config: PyTorchScalingConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        check_runnable(train_func, "train_func")
        self.train_func = train_func
        self.scaling_config = scaling_config or self._default_scaling
        self.run_config = run_config or RunConfig()

    def run(
        self,
        *args: Any,
        dataset_map: Mapping[str, DataConnector] | None = None,
        hyper_params: Mapping[str, Any] | None = None,
        artifact_location: str | None = None,
        artifact_stage_location: str | None = None,
        **kwargs: Any,
    ) -> Response:
        """Run the function or script on all ranks, and wait until all ranks have ended.

        Args:
            args: Positional arguments of the function, or command-line arguments of the script.
            dataset_map: Datasets by name, which the function gets from ``get_context().get_dataset_map()``. Every rank
                reads all rows of a `DataConnector`, and its own share of the rows of a `ShardedDataConnector`.
            hyper_params: Plain data, which the function gets from ``get_context().get_hyper_params()``.
            artifact_location: Directory or URI for the model, which all nodes must be able to write to.
            artifact_stage_location: Alias of `artifact_location`; pass only one of the two.
            kwargs: Keyword arguments of the function.

        Raises:
            InvalidArgumentError: The function does not accept the arguments, the arguments cannot be pickled, or the
                script cannot be read.
            DataError: A dataset cannot be used.
            CapacityError: The active nodes have no room for the workers.
            TrainingError: A rank raised an exception; the error describes the first one, and its notes contain the
                traceback of each rank that failed.
            WorkerLostError: Workers or their nodes were lost more often than `max_restarts` allows.
            JobFailedError: The call ran as a job on a pool, and the job failed, for whatever reason. The error is a
                TrainingError, too. Its message ends with the cause, and its notes contain the traceback of each rank
                that failed.
            JobCancelledError: The call ran as a job on a pool, and the job was cancelled.
        """
        response: Response = self._call(
            args, kwargs, dataset_map, hyper_params, artifact_location, artifact_stage_location
        ).run()
        return response

    @same_arguments(run)
    def submit(self, **arguments: Any) -> SubmittedCall[Response]:
        """Run the function or script on all ranks as a job, and return without waiting for the job.

        The job goes on when this process ends. The arguments are those of `run`.

        Returns:
            Handle of the call, whose ``result()`` returns the same as `run`.

        Raises:
            InvalidArgumentError: An argument is not legal, as in `run`; or this process is connected to a Ray cluster,
                where calls do not run as jobs.
        """
        return self._call(**arguments).submit()

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dataset_map: Mapping[str, DataConnector] | None,
        hyper_params: Mapping[str, Any] | None,
        artifact_location: str | None,
        artifact_stage_location: str | None,
    ) -> Call[Any]:
        if artifact_location and artifact_stage_location:
            raise InvalidArgumentError("artifact_stage_location is another name of artifact_location: give only one")
        location = artifact_location or artifact_stage_location
        program = Program.of(self.train_func, args, kwargs)
        for name, connector in (dataset_map or {}).items():
            if not isinstance(connector, DataConnector):
                raise InvalidArgumentError(
                    f'dataset_map["{name}"] must be a DataConnector or a ShardedDataConnector, not '
                    f"{type(connector).__name__}"
                )
        spec = FunctionJobSpec(
            name=name_of(program.target),
            dataset_map={name: connector.to_spec() for name, connector in (dataset_map or {}).items()},
            hyper_params=dict(hyper_params or {}),
            scaling_config=self.scaling_config,
            run_config=self.run_config.model_copy(
                update={"artifact_location": resolved(location)} if location else None
            ),
            program=NOT_STORED,
        )
        return Call(call_of(spec, packed(program, self.run_config)))


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
        spec = FunctionJobSpec(
            name=name_of(program.target),
            scaling_config=self._scaling(),
            torch_distributor="local" if self.local_mode else "distributed",
            run_config=config,
            program=NOT_STORED,
            returns=returns,
        )
        return Call(call_of(spec, packed(program, config)))

    def _scaling(self) -> AnyScaling:
        gpus = self.gpus_per_process if self.use_gpu else 0
        if not self.local_mode:
            each = WorkerResourceConfig(num_cpus=1, num_gpus=gpus)
            return SpreadScalingConfig(num_workers=self.num_processes, resource_requirements_per_worker=each)
        # The processes reserve no CPUs, so that all processes share the machine's CPUs, as in PySpark's local mode.
        each = WorkerResourceConfig(num_cpus=0, num_gpus=gpus)
        return PyTorchScalingConfig(num_workers_per_node=self.num_processes, resource_requirements_per_worker=each)
