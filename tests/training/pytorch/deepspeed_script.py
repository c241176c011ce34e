"""A script for DeepSpeed's ZeRO as its documentation has the launcher start it; nothing in it knows of shoal."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import TensorDataset


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--out", required=True)
    # DeepSpeed's own launcher passes this argument. Other launchers set LOCAL_RANK instead.
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(arguments)

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
        training_data=TensorDataset(x, x.sum(1, keepdim=True)),
        config={
            "train_batch_size": args.batch,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": args.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    losses, rows = [], 0
    for epoch in range(args.epochs):
        for features, target in loader:
            loss = torch.nn.functional.mse_loss(engine(features), target)
            engine.backward(loss)
            engine.step()
            mean = loss.detach() / size
            deepspeed.comm.all_reduce(mean)
            losses.append(mean.item())
            rows += len(features)
        print(f"process {rank} of {size}, epoch {epoch}, loss {losses[-1]:.4f}")

    seen = torch.zeros(size, dtype=torch.long)
    seen[rank] = rows
    deepspeed.comm.all_reduce(seen)
    if rank == 0:
        weights = [parameter.flatten().tolist() for parameter in engine.module.parameters()]
        found = {"losses": losses, "weights": weights, "rows": dict(enumerate(seen.tolist()))}
        Path(args.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
