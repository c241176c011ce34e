"""What a function that runs in a gang asks of it; outside of one, it is rank 0 of 1."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.context import say

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.training.pytorch.checkpoints import Checkpoints

Report = Callable[[dict[str, float], int | None], None]
"""Takes metrics and the step that they are of."""


class MetricsReporter:
    """Sends metrics to whoever started the training, while it runs.

    Args:
        report: Takes them.
    """

    def __init__(self, report: Report) -> None:
        self._report = report

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Reports values; rank 0's are the run's own in MLflow, the others' have their rank in front.

        Args:
            metrics: Name -> number, or tensor of one.
            step: What the values are of; by default one more than the last of this rank.

        Raises:
            InvalidArgumentError: If a value is no number.
        """
        values = {}
        for name, value in metrics.items():
            try:
                values[str(name)] = float(value)
            except (TypeError, ValueError):
                raise InvalidArgumentError(f'the metric "{name}" must be a number, not {value!r}') from None
        self._report(values, step)


class Context:
    """A function's place in its gang, and what was handed to it; :func:`get_context` returns it.

    Args:
        dataset_map: Datasets by name.
        hyper_params: What was given as such.
        model_dir: This rank's folder; one that is made when it is asked for by default.
        checkpoints: Where states are kept; in this process by default.
        report: Takes metrics; they are printed by default.
    """

    def __init__(
        self,
        dataset_map: Mapping[str, DataConnector] | None = None,
        hyper_params: Mapping[str, Any] | None = None,
        model_dir: str | None = None,
        checkpoints: Checkpoints | None = None,
        report: Report | None = None,
    ) -> None:
        self._dataset_map = dict(dataset_map or {})
        self._hyper_params = dict(hyper_params or {})
        self._model_dir = model_dir
        self._checkpoints = checkpoints
        self._state: Any = None
        self._reporter = MetricsReporter(report or _print)

    def get_rank(self) -> int:
        """Rank of this worker, from 0."""
        return _number("RANK", 0)

    def get_local_rank(self) -> int:
        """Rank among the workers of this node, from 0."""
        return _number("LOCAL_RANK", 0)

    def get_node_rank(self) -> int:
        """Number of this node among the gang's, from 0."""
        return _number("GROUP_RANK", 0)

    def get_world_size(self) -> int:
        """Number of workers."""
        return _number("WORLD_SIZE", 1)

    def get_local_world_size(self) -> int:
        """Number of workers on this node."""
        return _number("LOCAL_WORLD_SIZE", 1)

    def get_master_addr(self) -> str:
        """Address of rank 0's node."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    def get_master_port(self) -> int:
        """Port of the rendezvous on it; 0 outside of a gang."""
        return _number("MASTER_PORT", 0)

    def get_dataset_map(self) -> dict[str, DataConnector]:
        """The datasets by name: of a `ShardedDataConnector`, ``get_shard()`` is this rank's part."""
        return dict(self._dataset_map)

    def get_hyper_params(self) -> dict[str, Any]:
        """What `run` was given as `hyper_params`."""
        return dict(self._hyper_params)

    def get_model_dir(self) -> str:
        """A folder of this rank's own: the files of all ranks become the run's model when all have succeeded."""
        if self._model_dir is None:
            self._model_dir = tempfile.mkdtemp(prefix="shoal-model-")
        return self._model_dir

    def get_metrics_reporter(self) -> MetricsReporter:
        """What sends metrics to whoever started the training."""
        return self._reporter

    def save_checkpoint(self, state: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Keeps a state for :meth:`get_checkpoint` after a restart; rank 0's counts, other ranks may call it or not.

        What is sharded over the ranks has to be gathered first: ``get_model_state_dict`` of
        ``torch.distributed.checkpoint.state_dict`` does so with ``full_state_dict=True``.

        Args:
            state: Whatever ``torch.save`` takes: usually the state of model and optimizer, and the epoch.
            metrics: Reported along with it.
        """
        if self.get_rank() == 0:
            if self._checkpoints is None:
                self._state = state
            else:
                self._checkpoints.save(state)
        if metrics:
            self._reporter.log_metrics(metrics)

    def get_checkpoint(self) -> Any:
        """The state that was saved last, on every rank the same, its tensors on the CPU; None if there is none."""
        return self._state if self._checkpoints is None else self._checkpoints.load()


@functools.cache
def _outside() -> Context:
    return Context()


# One per process: threads that the user starts in a worker are of the same rank.
_current: Context | None = None


def get_context() -> Context:
    """The context of this process; outside of a gang that of rank 0 of 1."""
    return _current or _outside()


def set_context(context: Context | None) -> None:
    """Sets the context of this process; a worker does so before it calls the user's function.

    Args:
        context: The context; None: outside again.
    """
    global _current
    _current = context


def described(metrics: Mapping[str, float], step: int | None) -> str:
    """Metrics as a line of a log."""
    values = ", ".join(f"{name}: {value:.5g}" for name, value in metrics.items())
    return values if step is None else f"step {step}, {values}"


def _print(metrics: Mapping[str, float], step: int | None) -> None:
    say(described(metrics, step))


def _number(variable: str, otherwise: int) -> int:
    return int(os.environ.get(variable, otherwise))
