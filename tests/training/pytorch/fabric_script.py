"""A training script for Lightning Fabric as its documentation has torchrun start it; nothing in it knows of shoal."""

import argparse
import json
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=args.devices, num_nodes=args.num_nodes, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(256, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=args.batch // fabric.world_size, shuffle=True))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    losses, rows = [], 0
    for epoch in range(args.epochs):
        for features, target in loader:
            loss = torch.nn.functional.mse_loss(model(features), target)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            rows += len(features)
        print(f"process {fabric.global_rank} of {fabric.world_size}, epoch {epoch}, loss {losses[-1]:.4f}")

    seen = fabric.all_gather(torch.tensor([fabric.global_rank, rows])).view(-1, 2)
    if fabric.is_global_zero:
        weights = [parameter.flatten().tolist() for parameter in model.parameters()]
        Path(args.out).write_text(json.dumps({"losses": losses, "weights": weights, "rows": dict(seen.tolist())}))


if __name__ == "__main__":
    main()
