"""A training script for Accelerate as its documentation has torchrun start it; nothing in it knows of shoal."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows of all processes together")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    x = torch.randn(256, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=args.batch // accelerator.num_processes, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses, rows = [], 0
    for epoch in range(args.epochs):
        for features, target in loader:
            loss = torch.nn.functional.mse_loss(model(features), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            rows += len(features)
        process = f"process {accelerator.process_index} of {accelerator.num_processes}"
        print(f"{process}, epoch {epoch}, loss {losses[-1]:.4f}")

    seen = accelerator.gather(torch.tensor([accelerator.process_index, rows])).view(-1, 2)
    if accelerator.is_main_process:
        weights = [parameter.flatten().tolist() for parameter in model.parameters()]
        Path(args.out).write_text(json.dumps({"losses": losses, "weights": weights, "rows": dict(seen.tolist())}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
