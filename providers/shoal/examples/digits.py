"""Handwritten digits and a convolutional network: what the PyTorch examples train on every rank.

Source: the 1,797 images of 8 x 8 pixels that scikit-learn brings (test set of the UCI ML hand-written digits).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import MissingExtraError
from shoal.examples.complete import complete
from shoal.state.home import subfolder

if TYPE_CHECKING:
    from shoal.jobs import FunctionJobSpec

LABEL = "digit"
PIXELS = tuple(f"pixel_{number:02}" for number in range(64))
"""Columns of an image, row by row, each 0 to 16."""

MODEL = "digits"
_EVERY = 5
"""One image of so many judges."""


def digit_files(folder: Path | None = None) -> tuple[str, str]:
    """Paths of the images to learn from and of those that judge, made first where they are not there.

    Args:
        folder: Where they are; in ``$SHOAL_HOME`` by default.
    """
    folder = folder or subfolder("examples") / "digits"
    if not folder.exists():
        _prepare(folder)
    return str(folder / "train.parquet"), str(folder / "holdout.parquet")


def _prepare(folder: Path) -> None:
    """Write both files, complete or not at all."""
    import pandas as pd

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "xgboost") from None
    images = load_digits()
    table = pd.DataFrame(images.data.astype("float32"), columns=list(PIXELS)).assign(**{LABEL: images.target})
    judges = table.index % _EVERY == 0
    with complete(folder) as partial:
        table[~judges].to_parquet(partial / "train.parquet", row_group_size=256, index=False)
        table[judges].to_parquet(partial / "holdout.parquet", index=False)


def training_spec(epochs: int = 15, workers: int = 2) -> FunctionJobSpec:
    """The job that trains the network, judges it and registers it.

    Args:
        epochs: Over all images.
        workers: One on each node.
    """
    from shoal.data import DataConnector, ShardedDataConnector
    from shoal.jobs import FunctionJobSpec

    learn, judge = digit_files()
    return FunctionJobSpec.parse(
        {
            "train_func": "shoal.examples.digits:train",
            "name": "digits",
            "dataset_map": {"train": ShardedDataConnector.from_parquet(learn)},
            "hyper_params": {"epochs": epochs, "batch_size": 32, "rate": 0.002},
            "scaling_config": {"num_nodes": workers},
            "run_config": {"max_restarts": 1},
            "register": {
                "model": MODEL,
                "metric": "accuracy",
                "holdout": DataConnector.from_parquet(judge),
                "label_col": LABEL,
                "input_cols": list(PIXELS),
            },
            "tracking": {"experiment": MODEL},
        }
    )


def train() -> dict[str, float]:
    """What every rank runs."""
    import torch

    from shoal.examples.networks import DigitNet, fit, keep

    torch.manual_seed(0)
    net = DigitNet()
    metrics = fit(net, torch.nn.functional.cross_entropy, PIXELS, LABEL)
    keep(torch.nn.Sequential(net, torch.nn.Softmax(dim=1)), len(PIXELS))
    return metrics
