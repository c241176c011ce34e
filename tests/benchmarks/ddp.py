"""What every side of the PyTorch benchmark trains: a small network, as DDP over gloo, each rank on random rows.

torchrun runs this module, all others call `train`. Rank 0 writes down when it did what, because not every side hands
back what a function returns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

FEATURES = 28
BATCH_ROWS = 1_024
WARM_UP_STEPS = 20
_BATCHES = 16  # made before the first step, and used in turn: random numbers are not what is measured


def train(steps: int, notes: str) -> None:
    """Trains.

    Args:
        steps: How many are timed, after those that warm up.
        notes: File for what rank 0 has to say.
    """
    called = time.time()
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    own_group = not distributed.is_initialized()  # Ray Train has made it, and destroys it
    if own_group:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    rows = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(BATCH_ROWS, FEATURES, generator=rows), torch.randn(BATCH_ROWS, 1, generator=rows))
        for _ in range(_BATCHES)
    ]
    layers = [nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    ends = []
    for step in range(WARM_UP_STEPS + steps):
        x, y = batches[step % len(batches)]
        loss = nn.functional.mse_loss(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        ends.append(time.time())
    if rank == 0:
        per_second = steps / (ends[-1] - ends[WARM_UP_STEPS - 1])
        said = {"called": called, "first_step": ends[0], "steps_per_second": per_second}
        Path(notes).write_text(json.dumps(said))
    if own_group:
        distributed.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2])
