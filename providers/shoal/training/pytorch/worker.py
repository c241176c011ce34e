"""One rank of a function's run: it meets the others, calls the user's function, and uploads what that leaves.

A run is `meet`, `call`, `upload`, each called on all ranks at once.
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil

from shoal.data.connector import DataConnector
from shoal.data.gang_position import set_current_shard
from shoal.data.spec import DatasetSpec
from shoal.training.context import get_context
from shoal.training.gang.worker import PeerError
from shoal.training.host import memory
from shoal.training.pytorch import model_dir
from shoal.training.pytorch.checkpoints import Checkpoints
from shoal.training.pytorch.console import tagged_output
from shoal.training.pytorch.context import Context, set_context
from shoal.training.pytorch.environment import Machine
from shoal.training.pytorch.mlflow import adopt_model
from shoal.training.pytorch.program import SCRIPT_FOLDER

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_JOIN_SECONDS = 300.0
"""How long the store waits for a rank that asks for a key: as long as PyTorch's own default."""

# How a collective says that another rank is gone; the exceptions are plain RuntimeErrors.
_PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "Broken pipe",
    "remote process exited",
    "gloo/transport",
)
_MODEL = "shoal-model-"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What all ranks are given.

    Args:
        program: A pickled :class:`~shoal.training.pytorch.program.Program`.
        dataset_map: Datasets by name.
        hyper_params: What ``get_hyper_params`` returns.
        checkpoints: Folder or URI for them.
        checkpoint_key: The run's key for their seals.
        checkpoint_seals: Seals of those to go on from: number -> seal.
        threads: PyTorch's threads.
        seed: Seed of the plan of sharded datasets.
    """

    program: bytes
    dataset_map: Mapping[str, DatasetSpec]
    hyper_params: Mapping[str, Any]
    checkpoints: str
    checkpoint_key: bytes
    checkpoint_seals: Mapping[int, str]
    threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a rank.

    Args:
        value: What the function returned.
        files: What it left in its model folder: path -> SHA-256.
        peak_rss_bytes: Highest resident size of its process.
    """

    value: Any
    files: dict[str, str]
    peak_rss_bytes: int


# Both are kept for as long as the process lives, which is one run.
_store: TCPStore | None = None
_folder: Path | None = None


def meet() -> Machine:
    """Says where this rank is; rank 0 opens the store at which all meet.

    Its socket is bound here, to the node's own address: left to itself, PyTorch listens on all addresses of the host,
    and asks nobody for a token.
    """
    global _store
    import ray
    from torch.distributed import TCPStore

    address = str(ray.util.get_node_ip_address())
    node = str(ray.get_runtime_context().get_node_id())
    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    if get_context().rank:
        return Machine(node, address, gpus)
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    _store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return Machine(node, address, gpus, port)


def call(assignment: Assignment, machine: Machine, environment: Mapping[str, str]) -> Outcome:
    """Calls the user's function.

    Args:
        assignment: What all ranks are given.
        machine: Where this rank is.
        environment: torchrun's variables for this rank.

    Raises:
        PeerError: If it failed because another rank is gone.
        Exception: What the function raised.
    """
    global _folder
    import torch

    place = get_context()
    os.environ.update(environment)
    if interface := _interface_of(machine.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    torch.set_num_threads(assignment.threads)
    set_current_shard(place.rank, place.world_size, assignment.seed)
    _remove_folders_of_the_dead()
    _folder = Path(tempfile.mkdtemp(prefix=f"{_MODEL}{os.getpid()}-"))
    memory.reset_peak()
    set_context(
        Context(
            {name: DataConnector.from_spec(spec) for name, spec in assignment.dataset_map.items()},
            assignment.hyper_params,
            str(_folder),
            Checkpoints(
                assignment.checkpoints,
                assignment.checkpoint_key,
                assignment.checkpoint_seals,
                tell=lambda seals: place.note({"checkpoints": dict(seals)}),
            ),
            lambda metrics, step: place.note({"metrics": metrics, "step": step}),
        )
    )
    try:
        with tagged_output(place.rank, place.log):
            value = cloudpickle.loads(assignment.program)()
    except Exception as error:
        if any(word in str(error) for word in _PEER_WORDS):
            raise PeerError(f"{type(error).__name__}: {error}") from error
        raise
    adopt_model(place.log)
    return Outcome(value, model_dir.digests(_folder), memory.peak_rss_bytes())


def upload(paths: Sequence[str], target: str) -> None:
    """Copies this rank's part of the model, removes its folder, and destroys a process group that was left open.

    Not before all ranks are through: one that had just made the group while another was still at it closed its
    connections, and the other failed.

    Args:
        paths: Which files.
        target: Directory or URI.
    """
    import torch

    assert _folder is not None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    model_dir.upload(_folder, paths, target)
    shutil.rmtree(_folder, ignore_errors=True)  # the node's temp folder goes with the node


def _interface_of(address: str) -> str | None:
    """The network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def _remove_folders_of_the_dead() -> None:
    """Workers that were killed leave theirs in the node's temp folder, which itself goes with the node."""
    for prefix in (_MODEL, SCRIPT_FOLDER):
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
            pid = folder.name.removeprefix(prefix).split("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)
