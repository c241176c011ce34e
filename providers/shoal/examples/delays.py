"""Train a perceptron on the flights with PyTorch, to predict arrival delays."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from shoal.examples.flights import FEATURES, LABEL, month_files, months_before, recent_files

if TYPE_CHECKING:
    from shoal.jobs import FunctionJobSpec

MODEL = "flight-delays-net"
RECENT_MODEL = "recent-flight-delays-net"
"""Name of the registered model of the scheduled runs. Versions of this model must not be compared with those of
`MODEL`, which may have been trained on the same flights of 2013."""

WINDOW_MONTHS = 3
"""Number of months that a scheduled run trains on."""

COLUMNS = tuple(name for name in FEATURES if name not in ("month", "day"))
"""Feature columns of the network. The date is left out because the network is evaluated on a month that is not in the
training data."""

_CODES = {"carrier_code": 16, "origin_code": 3, "dest_code": 105}
"""Number of different codes in 2013, by the name of each column that contains codes instead of quantities. The network
has an embedding for each of these columns."""


def training_spec(month: int = 12, epochs: int = 3, workers: int = 2) -> FunctionJobSpec:
    """Return the spec of a job that trains the network on the months before `month` and evaluates it on `month`.

    Args:
        month: Month of 2013, from 2 to 12.
        epochs: Number of epochs over the training data.
        workers: Number of workers, one per node.
    """
    run_name = f"until 2013-{month - 1:02}"
    return _spec(MODEL, month_files(range(1, month)), month_files([month]), run_name, epochs, workers)


def scheduled_spec(moment: datetime, epochs: int = 3, workers: int = 2) -> FunctionJobSpec:
    """Return the spec of a job that trains the network on some months and evaluates it on the month after them.

    All these months are complete: the last of them ends before the month of `moment` begins.

    Args:
        moment: Time for which the run is scheduled.
        epochs: Number of epochs over the training data.
        workers: Number of workers, one per node.
    """
    *window, holdout = months_before(moment, WINDOW_MONTHS + 1)
    run_name = f"{window[0]} to {window[-1]}"
    return _spec(RECENT_MODEL, recent_files(window), recent_files([holdout]), run_name, epochs, workers)


def _spec(
    model: str, train: list[str], holdout: list[str], run_name: str, epochs: int, workers: int
) -> FunctionJobSpec:
    from shoal.data import DataConnector, ShardedDataConnector
    from shoal.jobs import FunctionJobSpec

    return FunctionJobSpec.parse(
        {
            "train_func": "shoal.examples.delays:train",
            "name": "delays",
            "dataset_map": {"train": ShardedDataConnector.from_parquet(train)},
            "hyper_params": {"epochs": epochs, "batch_size": 256, "rate": 0.005},
            "scaling_config": {"num_nodes": workers},
            "run_config": {"max_restarts": 1},
            "register": {
                "model": model,
                "metric": "rmse",
                "holdout": DataConnector.from_parquet(holdout),
                "label_col": LABEL,
                "input_cols": list(COLUMNS),
            },
            "tracking": {"experiment": model, "run_name": run_name},
        }
    )


def train() -> dict[str, float]:
    """Train the network on this rank (worker), and return the metrics of the training."""
    import torch

    from shoal.examples.networks import DelayNet, fit, keep

    torch.manual_seed(0)
    indices = {name: index for index, name in enumerate(COLUMNS)}
    numbers = [index for name, index in indices.items() if name not in _CODES]
    net = DelayNet(numbers, {indices[name]: values for name, values in _CODES.items()})
    metrics = fit(net, _squared_hours, COLUMNS, LABEL)
    keep(net, len(COLUMNS))
    return metrics


def _squared_hours(predicted: Any, minutes: Any) -> Any:
    """Return the mean squared error of predicted delays. The delays are in minutes, and the error is in square hours.

    The scale of hours suits Adam's usual learning rates.
    """
    return (((predicted - minutes) / 60) ** 2).mean()
