"""Define the two networks of the PyTorch examples, and the training loop that every rank runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shoal.data import ShardedDataConnector
from shoal.distributors.pytorch import get_context

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DigitNet(nn.Module):  # type: ignore[misc]
    """Small convolutional network that classifies images of 8 x 8 pixels as one of ten digits.

    The input is the pixels ``[rows, 64]`` with values from 0 to 16, and the output is the logits ``[rows, 10]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[rows, 10]`` of images, given their pixels ``[rows, 64]``."""
        return self.layers((pixels / 16).reshape(-1, 1, 8, 8))


class DelayNet(nn.Module):  # type: ignore[misc]
    """Perceptron that predicts the arrival delay of flights.

    The input is the features ``[rows, features]``, and the output is the delays in minutes ``[rows]``.

    Args:
        numbers: Indices of the numeric columns.
        codes: Number of different codes, by the index of each column that contains codes.
    """

    def __init__(self, numbers: Sequence[int], codes: dict[int, int]) -> None:
        super().__init__()
        self.numbers = list(numbers)
        self.codes = list(codes)
        # This layer scales numeric features by their mean and variance. With momentum=None, mean and variance are
        # averages over all batches so far. Averages over only the last batches would depend on a few flights with a
        # very large delay.
        self.scale = nn.BatchNorm1d(len(self.numbers), momentum=None, affine=False)
        self.embeddings = nn.ModuleList(nn.Embedding(values, 4) for values in codes.values())
        self.layers = nn.Sequential(
            nn.Linear(len(self.numbers) + 4 * len(codes), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Predict the arrival delays in minutes, one for each row of `features`; a missing feature counts as 0."""
        features = torch.nan_to_num(features)
        parts = [self.scale(features[:, self.numbers])]
        for index, embedding in zip(self.codes, self.embeddings, strict=True):
            parts.append(embedding(features[:, index].long()))
        # The layers predict hours and not minutes, because the outputs of untrained layers are about as large as delays
        # in hours.
        return self.layers(torch.cat(parts, dim=1))[:, 0] * 60


def fit(net: nn.Module, loss_of: Loss, features: Sequence[str], label: str) -> dict[str, float]:
    """Train a network with DDP on every rank, starting from the last checkpoint if there is one.

    The job's hyper-parameters must contain ``epochs``, ``batch_size`` (per rank) and ``rate`` (learning rate), and the
    job's dataset map must contain "train".
    """
    context = get_context()
    hyper = context.get_hyper_params()
    torch.distributed.init_process_group("gloo")
    train = context.get_dataset_map()["train"]
    assert isinstance(train, ShardedDataConnector)
    columns = [*features, label]
    rows = train.get_shard().to_torch_dataset(batch_size=hyper["batch_size"], shuffle=True, columns=columns)
    model = DistributedDataParallel(net)
    optimiser = torch.optim.Adam(net.parameters(), hyper["rate"])
    begin, mean = 0, float("nan")
    state: Any = context.get_checkpoint()
    if state is not None:
        net.load_state_dict(state["net"])
        optimiser.load_state_dict(state["optimiser"])
        begin, mean = state["epoch"], state["loss"]
    for epoch in range(begin, hyper["epochs"]):
        rows.set_epoch(epoch)
        losses = []
        for batch in DataLoader(rows, batch_size=None):
            inputs = torch.stack([batch[name].float() for name in features], dim=1)
            loss = loss_of(model(inputs), batch[label])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        sum_of_means = torch.stack(losses).mean()
        torch.distributed.all_reduce(sum_of_means)
        mean = float(sum_of_means / torch.distributed.get_world_size())
        state = {"net": net.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch + 1, "loss": mean}
        context.save_checkpoint(state)
        if context.get_rank() == 0:
            context.get_metrics_reporter().log_metrics({"train-loss": mean}, step=epoch)
    return {"train-loss": mean}


def keep(net: nn.Module, num_features: int) -> None:
    """Save rank 0's network: its weights in the model folder, and the whole network in the job's MLflow run."""
    context = get_context()
    if context.get_rank():
        return
    torch.save(net.state_dict(), f"{context.get_model_dir()}/model.pt")
    if "MLFLOW_RUN_ID" not in os.environ:  # the job has no MLflow run
        return
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    example = np.zeros((2, num_features), np.float32)
    output = net.eval()(torch.from_numpy(example)).detach().numpy()
    signature = ModelSignature(
        Schema([TensorSpec(example.dtype, (-1, num_features))]),
        Schema([TensorSpec(output.dtype, (-1, *output.shape[1:]))]),
    )
    mlflow.pytorch.log_model(
        net, name="model", signature=signature, input_example=example, pip_requirements=[f"torch=={torch.__version__}"]
    )
