"""Define the context of a training function, with its rank, datasets, metrics and checkpoints.

A process that is not a worker of a run has rank 0 and world size 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

from shoal.errors import InvalidArgumentError
from shoal.training.host.output_lines import OutputLines, looked_at
from shoal.training.reporting import say

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.training.pytorch.checkpoints import Checkpoints

_STEP_LIMIT = 2**63
"""MLflow's database stores steps below this number."""

Report = Callable[[dict[str, float], int | None], None]
"""Type of a function that receives metrics (name -> value) and the step of the metrics, which may be None."""


class MetricsReporter:
    """Reporter that checks the metrics that user code logs, and sends them to the driver during the training.

    Args:
        report: Function to call with metrics and step.
    """

    def __init__(self, report: Report) -> None:
        self._report = report

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send metrics to the driver, the process that controls the run.

        In MLflow the metrics of rank 0 keep their names. The metrics of other ranks get the rank as a prefix.

        Raises:
            InvalidArgumentError: A value is not a number, or the step is not a whole number of at most 64 bits.
        """
        step = None if step is None else _step(step)
        values = {str(name): _numbers(name, value) for name, value in metrics.items()}
        if single := {name: value for name, value in values.items() if isinstance(value, float)}:
            self._report(single, step)
        for name, value in values.items():
            for position, number in enumerate(value if isinstance(value, list) else ()):
                self._report({name: number}, position)


class Context:
    """Object that gives a training function its rank, datasets, model folder, checkpoints and metrics.

    :func:`get_context` returns the context of this process.

    Args:
        dataset_map: Datasets by name.
        hyper_params: Hyperparameters of the run.
        model_dir: Model folder of this rank; by default a temporary folder, created at the first use.
        checkpoints: Checkpoints of the run; by default states are kept in the memory of this process.
        report: Function to call with metrics and step; by default metrics are printed.
        leaving: Function that returns Ray's ids of the run's nodes that will shut down soon. The default function
            returns an empty set.
    """

    def __init__(
        self,
        dataset_map: Mapping[str, DataConnector] | None = None,
        hyper_params: Mapping[str, Any] | None = None,
        model_dir: str | None = None,
        checkpoints: Checkpoints | None = None,
        report: Report | None = None,
        leaving: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._dataset_map = dict(dataset_map or {})
        self._hyper_params = dict(hyper_params or {})
        self._model_dir = model_dir
        self._checkpoints = checkpoints
        self._state: Any = None
        self._reporter = MetricsReporter(report or (lambda metrics, step: say(described(metrics, step))))
        self._leaving = leaving
        self._saved_for: frozenset[str] = frozenset()

    def get_rank(self) -> int:
        """Return the rank of this worker; the first worker has rank 0."""
        return _number("RANK", 0)

    def get_world_rank(self) -> int:
        """Return the rank of this worker, like :meth:`get_rank`. Snowflake's samples use this name."""
        return self.get_rank()

    def get_local_rank(self) -> int:
        """Return the rank of this worker among the workers on its node. The first worker on each node has local rank
        0."""
        return _number("LOCAL_RANK", 0)

    def get_node_rank(self) -> int:
        """Return the number of this node among the nodes of the run; the first node has number 0."""
        return _number("GROUP_RANK", 0)

    def get_world_size(self) -> int:
        """Return the number of workers of the run, or 1 if this process is not a worker."""
        return _number("WORLD_SIZE", 1)

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return _number("LOCAL_WORLD_SIZE", 1)

    def get_master_addr(self) -> str:
        """Return the address of the node on which rank 0 runs, or 127.0.0.1 if this process is not a worker."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    def get_master_port(self) -> int:
        """Return the port on rank 0's node at which the ranks find each other, or 0 if this process is not a worker."""
        return _number("MASTER_PORT", 0)

    def get_supported_backends(self) -> list[str]:
        """Return the backends that this PyTorch has for ``init_process_group``, such as ``["gloo", "nccl"]``."""
        import torch.distributed as dist

        checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        return [name for name, is_available in checks.items() if is_available()]

    def get_default_backend(self) -> str:
        """Return the backend that fits the worker: ``nccl`` if it has a GPU, else ``gloo``."""
        import torch

        return "nccl" if torch.cuda.is_available() else "gloo"

    def get_dataset_map(self) -> dict[str, DataConnector]:
        """Return the datasets by name; ``get_shard()`` of a `ShardedDataConnector` returns this rank's rows."""
        return dict(self._dataset_map)

    def get_hyper_params(self) -> dict[str, Any]:
        """Return the hyperparameters of the run, which the caller passed as `hyper_params`."""
        return dict(self._hyper_params)

    def get_model_dir(self) -> str:
        """Return the folder for this rank's model files. If all ranks succeed, the files of all ranks are merged into
        the run's model."""
        if self._model_dir is None:
            self._model_dir = tempfile.mkdtemp(prefix="shoal-model-")
        return self._model_dir

    def get_artifact_manager(self) -> NoReturn:
        """Refuse the call, which code for Snowflake makes: shoal stores a run's files without such an object.

        Raises:
            InvalidArgumentError: Always; the message says which methods store files.
        """
        raise InvalidArgumentError(
            "there is no artifact manager here: write the model's files into get_model_dir(), which is stored when all "
            "ranks have succeeded, and pass a state that a restart needs to save_checkpoint()"
        )

    def get_metrics_reporter(self) -> MetricsReporter:
        """Return the reporter that sends metrics to the driver."""
        return self._reporter

    def save_checkpoint(self, state: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Save the state of the training as a checkpoint, which :meth:`get_checkpoint` returns after a restart.

        Only the state of rank 0 is saved. Other ranks need not call this method. A state that is sharded over the ranks
        has to be gathered first, for example with ``get_model_state_dict`` of
        ``torch.distributed.checkpoint.state_dict`` and ``full_state_dict=True``.
        """
        leaving = self._leaving()
        if self.get_rank() == 0:
            if self._checkpoints is None:
                self._state = state
            else:
                self._checkpoints.save(state)
        self._saved_for |= leaving
        if metrics:
            self._reporter.log_metrics(metrics)

    def should_checkpoint(self) -> bool:
        """Return whether a node of the run will shut down soon, and this rank has saved no checkpoint since the
        announcement of the shutdown.

        Examples of such nodes are spot machines that the cloud provider takes back, and nodes that are drained. After
        the loss of the node, the run continues from the last checkpoint. Call this method after each step on rank 0; a
        call takes microseconds, and asks Ray at most once a second. Different ranks may get True at different steps.
        """
        return bool(self._leaving() - self._saved_for)

    def get_checkpoint(self) -> Any:
        """Return the state that was saved last, or None if no state was saved. Tensors are loaded to the CPU.

        All ranks get the state that rank 0 saved.
        """
        return self._state if self._checkpoints is None else self._checkpoints.load()


_outside = Context()


# The context is a global variable and not a `ContextVar`, so that threads that user code starts in a worker also have
# the worker's context.
_current: Context | None = None


def get_context() -> Context:
    """Return the context of this process; a process that is not a worker counts as rank 0 of a run with one rank."""
    return _current or _outside


def set_context(context: Context | None) -> None:
    """Set the context of this process; a worker calls this function before it calls the user's function."""
    global _current
    _current = context


def described(metrics: Mapping[str, float], step: int | None) -> str:
    """Format metrics and their step as a log line, such as ``step 3, loss: 0.25``."""
    values = ", ".join(f"{name}: {value:.5g}" for name, value in metrics.items())
    return values if step is None else f"step {step}, {values}"


def _numbers(name: Any, value: Any) -> float | list[float]:
    """Convert the value of a metric to a number, or to a list of numbers."""
    try:
        return [float(each) for each in value] if isinstance(value, list | tuple) else float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f'the metric "{name}" must be a number, not {value!r}') from None


def _step(step: Any) -> int:
    """Convert the step of metrics, such as a NumPy integer or ``3.0``, to an `int`."""
    try:
        number = int(step)
        fits = number == step and abs(number) < _STEP_LIMIT
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise InvalidArgumentError(f"the step of metrics must be a whole number of at most 64 bits, not {step!r}")
    return number


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


@contextlib.contextmanager
def tagged_output(rank: int, log: Callable[[str], None]) -> Iterator[None]:
    """Send each line of Python's standard output and standard error to the function `log`, with a tag such as
    ``[rank 0]`` in front of the line, until the ``with`` block ends.
    """

    def show(new: list[str]) -> None:
        for line in new:
            log(f"[rank {rank}] {line}")

    lines = OutputLines(show)
    # The stream is not closed, because a handler of `logging` may print to it later.
    stream: Any = io.TextIOWrapper(cast(Any, lines), "utf-8", errors="backslashreplace", line_buffering=True)
    with looked_at(lines), contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the function has closed the stream
                stream.flush()
