"""Run one worker of a PyTorch training: find the other ranks, call the user's function with the environment of
torchrun, and upload the model files.

The driver calls the functions `meet`, `call` and `upload` one after the other, each on all ranks at once.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import shutil
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import UnusableGpuError
from shoal.os_processes import variables_set
from shoal.training.cluster import LeavingNodes, own_address, ray_if_connected
from shoal.training.gang.worker import PeerError
from shoal.training.host import memory, own_process
from shoal.training.host.own_process import ending_forks
from shoal.training.host.usage import USAGE_NOTE, measured
from shoal.training.pytorch import checkpoints
from shoal.training.pytorch.checkpoints import Checkpoints
from shoal.training.pytorch.context import Context, set_context, tagged_output
from shoal.training.pytorch.program import SCRIPT_FOLDER, Script, name_of
from shoal.training.pytorch.request import MissingValue
from shoal.training.reporting import gang_context, set_gang_context
from shoal.training.timeouts import TORCH_JOIN_S
from shoal.training.tracking import adopt_model, let_user_choose_experiment

if TYPE_CHECKING:
    from torch.distributed import TCPStore


@dataclass(frozen=True, slots=True)
class Machine:
    """Node, address and GPUs of one worker, from which the worker's environment variables are built.

    Args:
        node: Id of the worker's node.
        address: Address of the node.
        gpus: GPUs assigned to the worker, in the format of CUDA_VISIBLE_DEVICES.
        port: Port of the store (PyTorch's key-value server) by which the ranks find each other. Only rank 0 has a
            store; the port of all other ranks is 0.
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()
    port: int = 0


def environments(
    machines: Sequence[Machine], *, threads: int, restarts: int, max_restarts: int, is_launcher: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank.

    Args:
        machines: Node, address and GPUs of each rank.
        is_launcher: Whether the program is not a rank, but starts others itself. It then gets no variables of a rank:
            scripts and libraries that find `RANK` would wait for a process group.

    Raises:
        UnusableGpuError: A node has several parts of GPUs for its ranks.
    """
    if is_launcher:
        return [{"OMP_NUM_THREADS": str(threads), **_visible_gpus(machines, machine.node)} for machine in machines]
    nodes = list(dict.fromkeys(machine.node for machine in machines))
    for node in nodes:
        gpus = _visible_gpus(machines, node).get("CUDA_VISIBLE_DEVICES", "").split(",")
        # NVIDIA's user guide of MIG, "CUDA_VISIBLE_DEVICES".
        if len(gpus) > 1 and any(gpu.startswith("MIG-") for gpu in gpus):
            raise UnusableGpuError(
                f"a node has {len(gpus)} GPUs, parts of MIG among them, but CUDA shows a process only one part: bring "
                "the pool up with gpus_per_node=1"
            )
    on_node = Counter(machine.node for machine in machines)
    first, world = machines[0], len(machines)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(sum(other.node == machine.node for other in machines[:rank])),
            "LOCAL_WORLD_SIZE": str(on_node[machine.node]),
            "GROUP_RANK": str(nodes.index(machine.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_RUN_ID": "shoal",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            # By default, rank 0 starts PyTorch's key-value server (the store). shoal has already started the server, so
            # that no other process can take the port. With TORCHELASTIC_USE_AGENT_STORE, rank 0 connects to this server
            # as a client, like all other ranks.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
            **_visible_gpus(machines, machine.node),
        }
        for rank, machine in enumerate(machines)
    ]


def _visible_gpus(machines: Sequence[Machine], node: str) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of all workers on a node, so that ``cuda:{LOCAL_RANK}`` works as in
    torchrun.

    The GPUs are in the order of the local ranks.
    """
    gpus = [gpu for machine in machines if machine.node == node for gpu in machine.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


_THREADS = 1


def run_local(
    function: Callable[..., Any],
    *args: Any,
    dataset_map: Mapping[str, DataConnector] | None = None,
    hyper_params: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function in this process as the only worker of a run, with the environment variables and context of a
    worker.

    Breakpoints work, no object is pickled, and no pool is needed.

    Example:
        >>> from shoal.distributors.pytorch import get_context, run_local
        >>> run_local(lambda: get_context().get_world_size())
        1
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine = Machine("here", "127.0.0.1", port=server.getsockname()[1])
    [environment] = environments([machine], threads=_THREADS, restarts=0, max_restarts=0)
    # TORCHELASTIC_USE_AGENT_STORE tells PyTorch that its key-value server (the store) is already running. In a local
    # run no server is running, so the variable is removed, and PyTorch starts the server itself.
    del environment["TORCHELASTIC_USE_AGENT_STORE"]
    with variables_set(environment):
        set_context(Context(dataset_map, hyper_params))
        try:
            return function(*args, **kwargs)
        finally:
            set_context(None)
            _leave_group()


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


# If another rank has ended, PyTorch raises a plain RuntimeError, so only the error's message shows the reason. If the
# message contains one of these texts, the worker raises PeerError, and the driver looks for the other rank's error.
_PEER_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "Broken pipe",
    "remote process exited",
    "gloo/transport",
)
_SPAWN = re.compile(r"on <module '__main__'|on __main__ failed|not found as __main__\.|__mp_main__")
_SPAWN_ADVICE = (
    "The class or function is defined in the calling script, which a process that was started by spawn or forkserver "
    'cannot import: move it into a module, or use DataLoader(..., multiprocessing_context="fork")'
)
_MODEL = "shoal-model-"
KEEP_BYTES = 2**30
"""Most bytes that are kept of a script's working folder. More are probably a downloaded dataset."""
MODEL_DIR_VARIABLE = "SHOAL_MODEL_DIR"
"""Environment variable with the rank's model folder, for scripts and the processes that they start."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Function, datasets and options of a run, which the driver sends to all ranks.

    Args:
        program: Pickled :class:`~shoal.training.pytorch.program.Program`.
        checkpoints: Checkpoints of the run, with the seals of those from which the run may resume.
        seed: Seed for the division of sharded datasets among the ranks.
        nodes: Ray's ids of the nodes on which the ranks run.
    """

    program: bytes
    dataset_map: Mapping[str, DatasetSpec]
    hyper_params: Mapping[str, Any]
    checkpoints: Checkpoints
    threads: int
    seed: int
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the user's function on one rank.

    Args:
        value: Pickled return value of the user's function; a `MissingValue` if the value cannot be pickled.
        files: SHA-256 digest of each file in the rank's model folder, by the file's relative path.
    """

    value: bytes | MissingValue
    files: dict[str, str]
    peak_rss_bytes: int


# The store (PyTorch's key-value server) and the model folder of this process. The variables are never reset, because a
# process serves only one run.
_store: TCPStore | None = None
_folder: Path | None = None
_placed: Mapping[str, int | None] | None = None
"""The files that travelled with the script; None if the program is a function."""
_kept_groups: list[Any] = []
"""Process groups that were destroyed (see `keep_groups`)."""


def meet(node: str, is_launcher: bool = False) -> Machine:
    """Return this rank's address and GPUs; on rank 0, also start PyTorch's key-value server for all ranks.

    PyTorch's key-value server (the store) requires no token, and by default listens on all addresses of the host.
    Therefore this function binds the server's socket to the node's address only.

    Args:
        node: Id of this rank's node.
        is_launcher: As in `environments`. Then there is no server, and PyTorch need not be installed.
    """
    global _store
    address, ray = own_address(), ray_if_connected()
    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids()) if ray else ()
    if is_launcher or gang_context().rank:
        return Machine(node, address, gpus)
    from torch.distributed import TCPStore

    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    _store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=TORCH_JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return Machine(node, address, gpus, port)


def call(assignment: Assignment, machine: Machine, environment: Mapping[str, str]) -> Outcome:
    """Set the environment variables and the context of this rank, and call the user's function.

    Raises:
        PeerError: The function failed because another rank is gone.
        Exception: Any other exception that the function raised.
    """
    global _folder, _placed
    gang = gang_context()
    os.environ.update(environment)
    interfaces = psutil.net_if_addrs().items()
    if interface := next((name for name, own in interfaces if machine.address in [each.address for each in own]), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if "RANK" in environment:
        import torch

        torch.set_num_threads(assignment.threads)
        keep_groups()
    set_gang_context(replace(gang, position=replace(gang.position, seed=assignment.seed)))
    # Killed workers left model and script folders.
    own_process.remove_folders_of_dead(_MODEL, SCRIPT_FOLDER)
    _folder = Path(tempfile.mkdtemp(prefix=f"{_MODEL}{os.getpid()}-"))
    os.environ[MODEL_DIR_VARIABLE] = str(_folder)
    let_user_choose_experiment(gang)
    memory.reset_peak()
    assignment.checkpoints.send_seals = lambda seals: gang.note({"checkpoints": dict(seals)})
    set_context(
        Context(
            {name: DataConnector.from_spec(spec) for name, spec in assignment.dataset_map.items()},
            assignment.hyper_params,
            str(_folder),
            assignment.checkpoints,
            lambda metrics, step: gang.note({"metrics": metrics, "step": step}),
            LeavingNodes(assignment.nodes),
        )
    )
    try:
        with (
            tagged_output(gang.rank, gang.log),
            measured(machine.gpus, lambda values: gang.note({USAGE_NOTE: values})),
            ending_forks(),
        ):
            program = cloudpickle.loads(assignment.program)
            sys.argv = [name_of(program.target)]  # not the arguments of Ray's worker, which argparse would refuse
            value = _pickled(program())
    except Exception as error:
        # `str(error)` may raise in a class of the user.
        text = "".join(traceback.format_exception_only(error)).strip()
        if any(word in text for word in _PEER_WORDS):
            raise PeerError(text) from error
        if _SPAWN.search(text):
            error.add_note(_SPAWN_ADVICE)
        raise
    finally:
        # Files that the function has left open may lie in the model folder; and a worker that failed is killed.
        own_process.write_open_files()
    adopt_model(gang.log)
    _placed = program.target.placed() if isinstance(program.target, Script) else None
    return Outcome(value, checkpoints.digests(_folder), memory.peak_rss_bytes())


def keep_written() -> tuple[dict[str, str], dict[str, int]]:
    """Copy the files that a script has written into the working folder to the model folder, on one rank of each node.

    This function is called when all ranks have ended the script.

    Returns:
        SHA-256 digests of all files in this rank's model folder; and the sizes of the files in the working folder that
        are not kept: those of a function, and of a script that has written more than :data:`KEEP_BYTES`.
    """
    assert _folder is not None
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return checkpoints.digests(_folder), {}
    written = own_process.written_files(_placed or {})
    if _placed is None or sum(written.values()) > KEEP_BYTES:
        return checkpoints.digests(_folder), written
    lost = {}
    for name, size in written.items():
        target = _folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():  # the script has saved another file with this name there
                lost[name] = size
            else:
                shutil.copy2(Path(own_process.entered_folder() or "", name), target)
        except OSError:
            lost[name] = size
    return checkpoints.digests(_folder), lost


def keep_groups() -> None:
    """Keep the process groups that are destroyed until this process ends.

    If a function destroys its group and then returns, its DDP model is the last owner of the group. The model's end
    then holds the GIL and waits for a thread of the group, which may wait for the GIL: the rank hangs (PyTorch 2.13;
    plain PyTorch hangs after some tens of such calls).
    """
    from torch import distributed

    if not distributed.is_available():
        return
    groups = distributed.distributed_c10d
    destroy = groups.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        _kept_groups.extend(groups._world.pg_map)
        destroy(*args, **kwargs)

    groups.destroy_process_group = distributed.destroy_process_group = destroy_process_group


def _pickled(value: Any) -> bytes | MissingValue:
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is not None and isinstance(value, parallel.DistributedDataParallel):
        # The wrapper can be unpickled only in a process group, which the driver and the caller do not have.
        print("the function returned a DistributedDataParallel: its module is returned instead", flush=True)
        value = value.module
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        return MissingValue(f"a {type(value).__qualname__} cannot be pickled ({type(error).__name__}: {error})")


def upload(paths: Sequence[str], target: str) -> None:
    """End PyTorch's process group, upload this rank's share of the model files, and remove the local model folder.

    The driver calls this function only after all ranks have returned from `call`. If a rank destroys its process group
    earlier, its connections close while another rank may still be creating the group, and the other rank fails.
    """
    assert _folder is not None
    _leave_group()
    checkpoints.upload(_folder, paths, target)
    # Files that cannot be removed now are removed later, together with the node's temporary folder.
    shutil.rmtree(_folder, ignore_errors=True)
