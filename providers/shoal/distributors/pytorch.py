"""`PyTorchDistributor` and `TorchDistributor`: functions and scripts that run in every worker of a gang."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.data.connector import DataConnector
from shoal.distributors.dispatch import run_function
from shoal.distributors.torch_distributor import TorchDistributor
from shoal.errors import InvalidArgumentError
from shoal.training.locations import resolved
from shoal.training.pytorch.context import Context, get_context
from shoal.training.pytorch.local_run import run_local
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import FunctionRequest, FunctionResult
from shoal.training.pytorch.scaling import PyTorchScalingConfig, WorkerResourceConfig
from shoal.training.run_config import RunConfig

__all__ = [
    "Context",
    "PyTorchDistributor",
    "PyTorchScalingConfig",
    "Response",
    "TorchDistributor",
    "WorkerResourceConfig",
    "get_context",
    "run_local",
]


@dataclass(frozen=True)
class Response:
    """What a run came to.

    Args:
        result: What the engine returned.
    """

    result: FunctionResult

    def get_model_dir(self) -> str:
        """The merged files of all ranks' model folders: a local path or a URI."""
        return self.result.model_dir

    def get_metrics(self) -> dict[str, float]:
        """The last value of each metric that rank 0 logged."""
        return dict(self.result.metrics)

    def get_results(self) -> list[Any]:
        """What each rank returned, by rank."""
        return list(self.result.results)


class PyTorchDistributor:
    """Runs a function in every worker of a gang, with torchrun's environment: DDP, FSDP2, Fabric and Accelerate as is.

    Args:
        train_func: The function, or the path of a script. It travels by value, with what it closes over.
        scaling_config: Nodes, workers on each, and what a worker claims; one worker of one CPU by default.
        run_config: Where and under which limits to run.

    Raises:
        InvalidArgumentError: If it is no function, or the script cannot be read.

    Example:
        >>> from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, get_context
        >>> def train():
        ...     return get_context().get_rank()
        >>> PyTorchDistributor(train, PyTorchScalingConfig(num_nodes=2)).run().get_results()
        [0, 1]
    """

    def __init__(
        self,
        train_func: Callable[..., Any] | str | os.PathLike[str],
        scaling_config: PyTorchScalingConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        if not callable(train_func) and not isinstance(train_func, str | os.PathLike):
            raise InvalidArgumentError(f"train_func must be a function or the path of a script, not {train_func!r}")
        self.train_func = train_func
        self.scaling_config = scaling_config or PyTorchScalingConfig()
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
        """Runs it, and waits for all ranks.

        Args:
            args: Arguments of the function; of a script, its command line.
            dataset_map: Datasets that ``get_context().get_dataset_map()`` hands out: of a `DataConnector` every rank
                sees all rows, of a `ShardedDataConnector` its own part.
            hyper_params: What ``get_context().get_hyper_params()`` returns; plain data.
            artifact_location: Directory or URI for the model, which all nodes reach.
            artifact_stage_location: The same, under another name.
            kwargs: Arguments of the function by name.

        Raises:
            InvalidArgumentError: If the function does not take the arguments, or something cannot be sent.
            DataError: If a dataset cannot be used.
            CapacityError: If the active nodes cannot hold the workers.
            TrainingError: If a rank raised: the first to do so, its traceback in the notes.
            WorkerLostError: If a worker or its node was lost more often than `max_restarts` allows.
        """
        if artifact_location and artifact_stage_location:
            raise InvalidArgumentError("artifact_location and artifact_stage_location are one: give one of them")
        program = Program.of(self.train_func, args, kwargs)
        location = artifact_location or artifact_stage_location
        request = self._request(name_of(program.target), dataset_map or {}, hyper_params or {}, location)
        return Response(run_function(request, program.dumps()))

    def _request(
        self, name: str, datasets: Mapping[str, DataConnector], hyper_params: Mapping[str, Any], location: str | None
    ) -> FunctionRequest:
        for key, connector in datasets.items():
            if not isinstance(connector, DataConnector):
                raise InvalidArgumentError(
                    f'dataset_map["{key}"] must be a DataConnector or a ShardedDataConnector, not '
                    f"{type(connector).__name__}"
                )
        elsewhere = {"artifact_location": resolved(location)} if location else {}
        return FunctionRequest(
            name=name,
            dataset_map={key: connector.to_spec() for key, connector in datasets.items()},
            hyper_params=dict(hyper_params),
            scaling_config=self.scaling_config,
            run_config=self.run_config.model_copy(update=elsewhere),
        )
