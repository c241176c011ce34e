"""What the tests have workers run; it travels by value."""

from __future__ import annotations

import atexit
import base64
import builtins
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shoal.distributors import runtime
from shoal.distributors.pytorch import get_context

TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def gpus() -> dict[str, Any]:
    return {name: os.environ[name] for name in ("WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}


def where(at_exit: str = "") -> dict[str, Any]:
    import torch

    context = get_context()
    builtins.left = (Path(context.get_model_dir()) / "open.txt").open("w")  # type: ignore[attr-defined]
    builtins.left.write("left open")  # type: ignore[attr-defined]
    if at_exit:
        atexit.register(Path(f"{at_exit}-{context.get_rank()}").write_text, "at exit")
    (Path(context.get_model_dir()) / "same.txt").write_text("same")
    (Path(context.get_model_dir()) / f"rank-{context.get_rank()}").mkdir()
    (Path(context.get_model_dir()) / f"rank-{context.get_rank()}" / "mine.txt").write_text(str(os.getpid()))
    context.get_metrics_reporter().log_metrics({"loss": torch.tensor(context.get_rank() + 0.5)})
    print("hello from", context.get_rank())
    print("and without an end", end="", file=sys.stderr)
    return {
        **{name: os.environ[name] for name in TORCHRUN},
        "hyper": context.get_hyper_params(),
        "asked": [
            context.get_rank(), context.get_local_rank(), context.get_node_rank(), context.get_world_size(),
            context.get_local_world_size(), context.get_master_addr(), context.get_master_port(),
        ],
        "other names": [
            context.get_world_rank(), runtime.get_global_rank(), runtime.get_local_rank(), runtime.get_node_rank(),
            runtime.get_world_size(), runtime.get_local_world_size(),
        ],
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
        "own": os.environ.get("TEST_OWN"),
    }  # fmt: skip


def rows_seen() -> tuple[list[float], int]:
    """This rank's part of "sharded", and how many rows it sees of "whole"."""
    datasets = get_context().get_dataset_map()
    mine = datasets["sharded"].get_shard().to_pandas()  # type: ignore[attr-defined]
    return mine["a"].tolist(), len(datasets["whole"].to_pandas())


def start_group(backend: str) -> Any:
    """Start the process group, and return this rank's device: with "nccl" its GPU, if the machine has any."""
    import torch

    torch.distributed.init_process_group(backend)
    if backend != "nccl" or not torch.cuda.device_count():
        return torch.device("cpu")
    device = torch.device("cuda", get_context().get_local_rank())
    torch.cuda.set_device(device)
    return device


def train(
    steps: int, batch: int, *, backend: str = "gloo", deed: str = "", at: int = -1, folder: str = ""
) -> list[float]:
    """A small regression by DDP with full batches of `batch` rows over all ranks; returns the losses that it saw.

    At step `at`, the last rank does something to itself, the first time.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    context = get_context()
    device = start_group(backend)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers.to(device))
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    start, losses = 0, []
    if (state := context.get_checkpoint()) is not None:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        start, losses = state["step"], state["losses"]
    rank, world = context.get_rank(), context.get_world_size()
    for step in range(start, steps):
        data = torch.Generator().manual_seed(step)
        x = torch.randn(batch, 4, generator=data).to(device)
        y = x.sum(1, keepdim=True)
        mine = slice(rank * batch // world, (rank + 1) * batch // world)
        if step == at and rank == world - 1 and not Path(folder, "done").exists():
            Path(folder, "done").write_text(str(os.getpid()))
            _do(deed)
        loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        whole = loss.detach()
        torch.distributed.all_reduce(whole)
        losses.append(float(whole) / world)
        context.save_checkpoint(
            {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1, "losses": losses},
            {"loss": losses[-1]},
        )
    if rank == 0:
        torch.save(model.module.state_dict(), Path(context.get_model_dir(), "model.pt"))
    return losses


def _do(deed: str) -> None:
    if deed == "raise":
        raise ZeroDivisionError("on purpose")
    if deed == "kill the node":
        os.kill(os.getppid(), signal.SIGKILL)  # its raylet; then the worker goes, too
    os.kill(os.getpid(), signal.SIGSTOP if deed == "stop" else signal.SIGKILL)


def learn_images(batch: int) -> dict[str, Any]:
    """DDP over rows of "images", each decoded here; then the same rows once more, in batches of columns.

    An image's first pixels hold its label, and its number in two bytes.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    kinds: dict[str, set[str]] = {"image": set(), "label": set()}
    by_row: list[tuple[int, int, int]] = []

    def pixels(image: str) -> Any:
        return torch.frombuffer(bytearray(base64.b64decode(image)), dtype=torch.uint8)

    def noted(image: Any, label: int) -> tuple[int, int, int]:
        return int(image[1]) * 256 + int(image[2]), int(image[0]), label

    def decoded(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
        for row in rows:
            for name, value in row.items():
                kinds[name].add(type(value).__name__)
        images = [pixels(row["image"]) for row in rows]
        by_row.extend(noted(image, row["label"]) for image, row in zip(images, rows, strict=True))
        return torch.stack(images).float() / 255, torch.tensor([row["label"] for row in rows])

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    mine = get_context().get_dataset_map()["images"].get_shard()  # type: ignore[attr-defined]
    model = DistributedDataParallel(torch.nn.Linear(28 * 28, 10))
    optimiser = torch.optim.SGD(model.parameters(), 0.02)
    losses = []
    for images, labels in DataLoader(mine.to_torch_dataset(shuffle=True), batch_size=batch, collate_fn=decoded):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    by_batch, shapes = [], []
    for columns in DataLoader(mine.to_torch_dataset(batch_size=1024)):
        shapes.append(tuple(columns["label"].shape))
        # The default collate_fn makes tuples of one out of text.
        for (image,), label in zip(columns["image"], columns["label"][0].tolist(), strict=True):
            by_batch.append(noted(pixels(image), label))
    weights = [parameter.flatten().tolist() for parameter in model.module.parameters()]
    return {
        "kinds": kinds,
        "by_row": by_row,
        "by_batch": by_batch,
        "shapes": shapes,
        "losses": losses,
        "weights": weights,
    }


def hang(folder: str) -> None:
    Path(folder, "done").write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def shard_fully(backend: str = "gloo") -> dict[str, Any]:
    """FSDP2: a few steps, and the whole state dict on rank 0."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    device = start_group(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (get_context().get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(20):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(step)).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"losses": losses, "local": local, "whole": {name: tuple(value.shape) for name, value in whole.items()}}


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("the text cannot be made")


def fail_without_text() -> None:
    raise TextlessError


def spawn_a_function_of_the_script() -> None:
    def rows() -> None: ...

    rows.__module__, rows.__qualname__ = "__main__", "rows"
    multiprocessing.get_context("spawn").Process(target=rows).start()


def unpicklable() -> Any:
    context = get_context()
    (Path(context.get_model_dir()) / "weights").write_text("trained")
    context.get_metrics_reporter().log_metrics({"loss": 0.5})
    return (number for number in range(3))


def sum_of_ranks(start: float) -> float:
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(total)
    return start + float(total)


def rows_in_pairs() -> list[int]:
    """Read two datasets at the same time, and return the sums of their rows."""
    one, other = (get_context().get_dataset_map()[name].get_shard() for name in ("one", "other"))  # type: ignore[attr-defined]
    pairs = zip(one.iter_batches(["a"]), other.iter_batches(["a"]), strict=True)
    return [first.num_rows + second.num_rows for first, second in pairs]
