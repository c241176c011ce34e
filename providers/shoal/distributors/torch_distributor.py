"""`TorchDistributor`: the shape that people know from PySpark and Databricks, over the same engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shoal.distributors.dispatch import run_function
from shoal.errors import InvalidArgumentError
from shoal.training.context import say
from shoal.training.pytorch.program import Program, name_of
from shoal.training.pytorch.request import FunctionRequest
from shoal.training.pytorch.scaling import (
    AnyScaling,
    PyTorchScalingConfig,
    SpreadScalingConfig,
    WorkerResourceConfig,
)
from shoal.training.run_config import RunConfig


class TorchDistributor:
    """Runs a function or a script in several processes, and returns what the first of them returned.

    Args:
        num_processes: How many. With `local_mode` and `use_gpu` no more than the node has GPUs: a higher number is
            reduced, with a warning.
        local_mode: All on one node, instead of spread over the pool.
        use_gpu: A GPU for each; without one, pass False.
        run_config: Where and under which limits to run.

    Raises:
        InvalidArgumentError: If `num_processes` is no positive number.

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
        run_config: RunConfig | None = None,
    ) -> None:
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
            raise InvalidArgumentError(f"num_processes must be a positive number, not {num_processes!r}")
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self.run_config = run_config or RunConfig()

    def run(self, main: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Runs it, and waits for all processes.

        Args:
            main: The function, or the path of a script.
            args: Arguments of the function; of a script, its command line.
            kwargs: Arguments of the function by name.

        Returns:
            What rank 0 returned; None of a script.

        Raises:
            InvalidArgumentError: If the function does not take the arguments, or something cannot be sent.
            CapacityError: If the active nodes cannot hold the processes.
            TrainingError: If a rank raised: the first to do so.
        """
        program = Program.of(main, args, kwargs)
        config = self.run_config
        if self.local_mode and self.use_gpu:
            config = config.model_copy(update={"clamp": True})
        request = FunctionRequest(name=name_of(program.target), scaling_config=self._scaling(), run_config=config)
        kind = ("local", "processes") if self.local_mode else ("distributed", "executor processes")
        say(f"Started {kind[0]} training with {self.num_processes} {kind[1]}")
        result = run_function(request, program.dumps())
        say(f"Finished {kind[0]} training with {result.num_workers} {kind[1]}")
        return result.results[0]

    def _scaling(self) -> AnyScaling:
        gpus = 1 if self.use_gpu else 0
        if not self.local_mode:
            each = WorkerResourceConfig(num_cpus=1, num_gpus=gpus)
            return SpreadScalingConfig(num_workers=self.num_processes, resource_requirements_per_worker=each)
        # As there: processes on one machine share its CPUs as they like.
        each = WorkerResourceConfig(num_cpus=0, num_gpus=gpus)
        return PyTorchScalingConfig(num_workers_per_node=self.num_processes, resource_requirements_per_worker=each)
