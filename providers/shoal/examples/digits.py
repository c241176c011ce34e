"""Train a convolutional network on handwritten digits with PyTorch.

The data is the 1,797 images of 8 x 8 pixels in scikit-learn (test set of the UCI ML hand-written digits).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import MissingExtraError
from shoal.examples.flights import complete
from shoal.state.home import subfolder

if TYPE_CHECKING:
    from shoal.jobs import FunctionJobSpec

LABEL = "digit"
PIXELS = tuple(f"pixel_{number:02}" for number in range(64))
"""Feature columns: the pixels of an image, row by row, with values from 0 to 16."""

MODEL = "digits"
_EVERY = 5
"""Every image whose number is a multiple of this value is in the holdout, and not in the training data."""


def digit_files(folder: Path | None = None) -> tuple[str, str]:
    """Return the paths of the training file and the holdout file; write both files if their folder does not exist."""
    folder = folder or subfolder("examples") / "digits"
    files = str(folder / "train.parquet"), str(folder / "holdout.parquet")
    if folder.exists():
        return files
    import pandas as pd

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "xgboost") from None
    images = load_digits()
    table = pd.DataFrame(images.data.astype("float32"), columns=list(PIXELS)).assign(**{LABEL: images.target})
    in_holdout = table.index % _EVERY == 0
    with complete(folder) as partial:
        table[~in_holdout].to_parquet(partial / "train.parquet", row_group_size=256, index=False)
        table[in_holdout].to_parquet(partial / "holdout.parquet", index=False)
    return files


def training_spec(epochs: int = 15, workers: int = 2) -> FunctionJobSpec:
    """Return the spec of a job that trains the network, evaluates it on the holdout and registers it.

    Args:
        epochs: Number of epochs over the training data.
        workers: Number of workers, one per node.
    """
    from shoal.data import DataConnector, ShardedDataConnector
    from shoal.jobs import FunctionJobSpec

    train_file, holdout_file = digit_files()
    return FunctionJobSpec.parse(
        {
            "train_func": "shoal.examples.digits:train",
            "name": "digits",
            "dataset_map": {"train": ShardedDataConnector.from_parquet(train_file)},
            "hyper_params": {"epochs": epochs, "batch_size": 32, "rate": 0.002},
            "scaling_config": {"num_nodes": workers},
            "run_config": {"max_restarts": 1},
            "register": {
                "model": MODEL,
                "metric": "accuracy",
                "holdout": DataConnector.from_parquet(holdout_file),
                "label_col": LABEL,
                "input_cols": list(PIXELS),
            },
            "tracking": {"experiment": MODEL},
        }
    )


def train() -> dict[str, float]:
    """Train the network on this rank (worker), and return the metrics of the training."""
    import torch

    from shoal.examples.networks import DigitNet, fit, keep

    torch.manual_seed(0)
    net = DigitNet()
    metrics = fit(net, torch.nn.functional.cross_entropy, PIXELS, LABEL)
    keep(torch.nn.Sequential(net, torch.nn.Softmax(dim=1)), len(PIXELS))
    return metrics
