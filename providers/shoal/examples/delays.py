"""The flights and a perceptron: what the PyTorch examples train on every rank beside the digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.examples.flights_data import FEATURES, LABEL, month_files

if TYPE_CHECKING:
    from shoal.jobs import FunctionJobSpec

MODEL = "flight-delays-net"

COLUMNS = tuple(name for name in FEATURES if name not in ("month", "day"))
"""What the network sees: of a month that it has not learned from, a number says nothing to it."""

_CODES = {"carrier_code": 16, "origin_code": 3, "dest_code": 105}
"""Columns that are no quantities, each with the number of its values in 2013."""


def training_spec(month: int = 12, epochs: int = 3, workers: int = 2) -> FunctionJobSpec:
    """The job that trains the network on the months before one, and judges it on that.

    Args:
        month: 2 to 12.
        epochs: Over all flights.
        workers: One on each node.
    """
    from shoal.data import DataConnector, ShardedDataConnector
    from shoal.jobs import FunctionJobSpec

    learn = ShardedDataConnector.from_parquet(month_files(range(1, month)))
    return FunctionJobSpec.parse(
        {
            "train_func": "shoal.examples.delays:train",
            "name": "delays",
            "dataset_map": {"train": learn},
            "hyper_params": {"epochs": epochs, "batch_size": 256, "rate": 0.005},
            "scaling_config": {"num_nodes": workers},
            "run_config": {"max_restarts": 1},
            "register": {
                "model": MODEL,
                "metric": "rmse",
                "holdout": DataConnector.from_parquet(month_files([month])),
                "label_col": LABEL,
                "input_cols": list(COLUMNS),
            },
            "tracking": {"experiment": MODEL, "run_name": f"until 2013-{month - 1:02}"},
        }
    )


def train() -> dict[str, float]:
    """What every rank runs."""
    import torch

    from shoal.examples.networks import DelayNet, fit, keep

    torch.manual_seed(0)
    places = {name: place for place, name in enumerate(COLUMNS)}
    numbers = [place for name, place in places.items() if name not in _CODES]
    net = DelayNet(numbers, {places[name]: values for name, values in _CODES.items()})
    metrics = fit(net, _squared_hours, COLUMNS, LABEL)
    keep(net, len(COLUMNS))
    return metrics


def _squared_hours(predicted: Any, minutes: Any) -> Any:
    """Mean squared error in hours, which is of a size that Adam's usual rates suit."""
    return (((predicted - minutes) / 60) ** 2).mean()
