"""Find the GPUs of this machine, and assign them to the nodes of a user's local pools. A lock file per GPU records
which node uses the GPU.

A node claims its GPUs before it starts: its supervisor locks the lock file of each GPU until the node has ended. The
lock files are in the host's temp folder, so that all home folders and stores of a user share them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CapacityError, CapacityTimeoutError, InvalidArgumentError
from shoal.os_processes import ProcessId, python_command
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.spec import PoolSpec
from shoal.state.home import file_lock, home, open_locked, store_tag
from shoal.state.private_folders import gpu_lock
from shoal.state.schema import Node

log = logging.getLogger("shoal.gpus")

ALL = -1
"""Value of `PoolSpec.gpus_per_node` for a node that gets all GPUs that no other node has claimed."""

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
SELECTORS = (CUDA_DEVICES, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
"""Environment variables by which users limit the GPUs that a process sees."""

_ASK_RAY = "import json; from shoal.pool.backends.local import raylet; print(json.dumps(raylet.other_gpus()))"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, or a part of one (an instance of NVIDIA's MIG).

    Args:
        id: UUID of an NVIDIA GPU; for other GPUs, the number by which Ray selects the GPU.
        is_nvidia: Whether NVIDIA has made the GPU.
        strangers: Ids of the processes of other users that use the GPU. Known only for GPUs of NVIDIA.
    """

    id: str
    is_nvidia: bool = True
    strangers: tuple[int, ...] = ()

    @property
    def lock(self) -> Path:
        """Return the path of the file that a node's supervisor locks to claim the GPU."""
        return gpu_lock(self.id if self.is_nvidia else f"other-{self.id}")


def visible_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """Find the GPUs that a process with the given environment variables may use.

    NVML finds the GPUs of NVIDIA. If NVML finds none, Ray is asked for GPUs of other makers.
    """
    return _nvidia(environment.get(CUDA_DEVICES)) or [
        Gpu(each, is_nvidia=False) for each in _non_nvidia_gpus(environment)
    ]


def check_number(per_node: int, nodes: int, environment: Mapping[str, str]) -> None:
    """Check that this machine has enough GPUs for a number of nodes, and warn if other users' processes use the GPUs.

    Raises:
        InvalidArgumentError: The machine has too few GPUs.
    """
    found, needed = visible_gpus(environment), per_node * nodes
    if needed > len(found):
        limit = f", with {CUDA_DEVICES}={environment[CUDA_DEVICES]}" if CUDA_DEVICES in environment else ""
        raise InvalidArgumentError(
            f"{nodes} node{'' if nodes == 1 else 's'} with gpus_per_node={per_node} need {_number(needed)}, but "
            f"{_number(len(found))} of this machine can be used{limit}: request fewer nodes or GPUs"
        )
    used = [gpu for gpu in found if gpu.strangers]
    if needed > len(found) - len(used):
        users = "; ".join(f"{gpu.id} by process {', '.join(map(str, gpu.strangers))}" for gpu in used)
        warnings.warn(f"the pool needs GPUs that other users' processes use: {users}", stacklevel=2)


@dataclass(frozen=True)
class Claimant:
    """The node that has claimed a GPU, as read from the GPU's lock file.

    Args:
        node: Id of the node.
        pool: Name of the node's pool.
        embedded: Whether the pool is embedded, so that it ends with a call or a job.
        store: Store that contains the pool's row (see `store_here`).
    """

    node: str
    pool: str
    embedded: bool
    store: str


def store_here() -> str:
    """Return a text that identifies this process's store on this host. Two pools may have the same name if they are in
    different stores, and this text distinguishes them."""
    return f"{home().resolve()}{store_tag()}"


def look(found: Sequence[Gpu]) -> tuple[int, list[Claimant]]:
    """Return the number of GPUs that no node has claimed, and the nodes that have claimed the other GPUs."""
    claimants: list[Claimant] = []
    # The check locks the file of each free GPU for a moment. A node that chooses GPUs at this moment would think that
    # the GPU is used. The lock "choosing" makes this node wait.
    with file_lock(gpu_lock("choosing")):
        for gpu in found:
            with open_locked(gpu.lock, wait=False) as is_free:
                if is_free and not _is_used(gpu.lock):
                    continue
            holder = _holder(gpu.lock)
            pool = holder.get("pool") or holder.get("name", "of another process")
            embedded, store = bool(holder.get("embedded")), holder.get("store", "")
            claimants.append(Claimant(holder.get("node", ""), pool, embedded, store))
    return len(found) - len(claimants), claimants


def may_be_contended(environment: Mapping[str, str]) -> bool:
    """Return whether nodes may compete for GPUs. This is possible if the machine has NVIDIA GPUs or a node has claimed
    a GPU.

    The check is quick, because it does not ask Ray for GPUs of other makers.
    """
    has_nvidia = bool(_nvidia(environment.get(CUDA_DEVICES)))
    return has_nvidia or any(map(_holder, gpu_lock("choosing").parent.glob("*.lock")))


class GpuClaim:
    """The GPUs that a node has claimed. The node keeps the GPUs until :meth:`release` is called or this process ends.

    Args:
        gpus: The claimed GPUs.
        locks: Open lock files of the GPUs.
    """

    def __init__(self, gpus: Sequence[Gpu], locks: ExitStack) -> None:
        self.gpus = tuple(gpus)
        self._locks = locks

    def show_only_these(self) -> None:
        """Hide all other GPUs from this process, and from the processes that it starts from now on."""
        ids = [gpu.id for gpu in self.gpus]
        if all(gpu.is_nvidia for gpu in self.gpus):
            os.environ[CUDA_DEVICES] = ",".join(ids)
        else:
            from shoal.pool.backends.local import raylet

            raylet.show_other_gpus(ids)

    def release(self) -> None:
        """Release the GPUs, so that other nodes can claim them. The node's processes must have ended."""
        for gpu in self.gpus:
            with suppress(FileNotFoundError):  # a clean-up of the temp folder may have removed the lock file
                os.truncate(gpu.lock, 0)
        self._locks.close()


def claim(wanted: int, node: Node, folder: Path, *, embedded: bool = False) -> GpuClaim:
    """Claim GPUs of this machine for a node. If possible, avoid GPUs that other users' processes use.

    Raises:
        CapacityError: Fewer GPUs than `wanted` are free.
    """
    if not wanted:
        return GpuClaim((), ExitStack())
    found = sorted(visible_gpus(os.environ), key=lambda gpu: bool(gpu.strangers))
    taken: list[Gpu] = []
    holders: list[str] = []
    # Only one process at a time may choose GPUs. Otherwise, two nodes that both need all GPUs could each claim a half
    # of them.
    with file_lock(gpu_lock("choosing")), ExitStack() as locks:
        for gpu in found:
            if len(taken) == wanted:
                break
            with ExitStack() as lock:
                if lock.enter_context(open_locked(gpu.lock, wait=False)) and not _is_used(gpu.lock):
                    locks.push(lock.pop_all())
                    taken.append(gpu)
                else:
                    holders.append(f"{gpu.id} by {_holder(gpu.lock).get('name', 'a node')}")
        if wanted > len(taken):
            raise CapacityError(
                f"the node needs {_number(wanted)}, but only {len(taken)} of this machine's {_number(len(found))} can "
                f"be claimed. GPUs that other nodes of this user have claimed: {'; '.join(holders) or 'none'}. Take "
                "down a pool that uses GPUs, or request fewer GPUs"
            )
        claimant = {"node": node.id, "name": node.name, "pool": node.pool, "embedded": embedded}
        claimant["store"] = store_here()
        content = json.dumps({**claimant, "folder": str(folder), "supervisor": ProcessId.mine().to_json()})
        for gpu in taken:
            gpu.lock.write_text(content)
            if gpu.strangers:
                log.warning("GPU %s is used by processes of other users: %s", gpu.id, gpu.strangers)
        return GpuClaim(taken, locks.pop_all())


def _is_used(path: Path) -> bool:
    """Return whether a node still uses the GPU with this lock file, although the node's supervisor was killed."""
    holder = _holder(path)
    if not holder:
        return False
    supervisor = ProcessId.from_json(holder["supervisor"])
    return bool(processes.of_node(holder["node"], [Path(holder["folder"])], supervisor))


def _holder(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text() or "{}"))
    except (FileNotFoundError, ValueError):
        # A clean-up of the temp folder has removed the lock file. Or the process that claimed the GPU was killed while
        # it wrote the file: the file is written before the node starts, so no node uses the GPU.
        return {}


def _nvidia(limit: str | None) -> list[Gpu]:
    """Return the NVIDIA GPUs, in the order of `nvidia-smi`. If CUDA_VISIBLE_DEVICES is set, return only the GPUs that
    this variable names, in the order of the variable."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the machine has no driver
        return []
    try:
        by_index = {str(index): list(_gpu_or_parts(index)) for index in range(pynvml.nvmlDeviceGetCount())}
    finally:
        pynvml.nvmlShutdown()
    everything = [gpu for units in by_index.values() for gpu in units]
    if limit is None:
        return everything
    chosen: list[Gpu] = []
    for name in (each.strip() for each in limit.split(",")):  # a number, a UUID, or the beginning of a UUID
        by_uuid = [gpu for gpu in everything if name.startswith(("GPU-", "MIG-")) and gpu.id.startswith(name)]
        named = by_index.get(name, by_uuid[:1])
        # CUDA ignores a name that is unknown or repeated, and all names after this name. So this loop ends at such a
        # name.
        if (not named and name not in by_index) or (named and named[0] in chosen):
            break
        chosen += named
    return chosen


def _gpu_or_parts(index: int) -> Iterator[Gpu]:
    """Yield the GPU with a given number. If MIG divides this GPU into parts, yield the parts instead."""
    import pynvml

    try:
        whole = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            is_divided, _ = pynvml.nvmlDeviceGetMigMode(whole)
        except pynvml.NVMLError:  # the GPU does not support MIG
            is_divided = False
        parts = [whole]
        if is_divided:
            parts = []
            for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
                with suppress(pynvml.NVMLError):  # the GPU has fewer parts
                    parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number))
        for part in parts:
            yield Gpu(pynvml.nvmlDeviceGetUUID(part), strangers=tuple(filter(_is_stranger, _users(part))))
    except pynvml.NVMLError as error:
        log.warning("GPU %d is not used, because NVML reports: %s", index, error)


def _users(part: Any) -> list[int]:
    """Return the ids of the processes that compute on a GPU; none if NVML does not report them, as in WSL."""
    import pynvml

    try:
        return [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(part)]
    except pynvml.NVMLError:
        return []


def _is_stranger(pid: int) -> bool:
    """Return whether a process belongs to another user. A process that this container cannot see counts as a process of
    another user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return True


def _non_nvidia_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the numbers of the visible non-NVIDIA GPUs. Ray assigns these numbers."""
    if "ray" in sys.modules:
        from shoal.pool.backends.local import raylet

        return raylet.other_gpus()
    # Ray reads its settings when it is imported, and these settings differ between pools. So Ray is imported in a new
    # process, and not in this process.
    unlimited = {name: value for name, value in os.environ.items() if name not in SELECTORS}
    limited = {**unlimited, **environment}
    asked = subprocess.run(python_command("-c", _ASK_RAY), env=limited, capture_output=True, text=True, check=False)
    try:
        return list(json.loads(asked.stdout))
    except ValueError:
        log.warning("Ray could not be asked for GPUs: %s", asked.stderr.strip())
        return []


def _number(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


_LOOK_S = 1.0
"""Seconds between two checks whether the GPUs are free. A pool needs 1 to 3 s to end."""


@contextmanager
def gpu_turn(
    spec: PoolSpec, timeout_s: float | None, say: Callable[[str], None], least: int = 1
) -> Iterator[list[Gpu]]:
    """Wait until other embedded pools have released enough GPUs, and yield the GPUs of this machine.

    The caller starts its pool inside the ``with`` block. During the block, no other embedded pool that uses GPUs can
    start, so two pools cannot use the same free GPUs. Pools that are not embedded may stay up for ever, so the function
    does not wait for them.

    Raises:
        CapacityTimeoutError: The GPUs were not released in time. The message names the pools that use them.
    """
    found = visible_gpus(os.environ) if spec.gpus_per_node and may_be_contended(os.environ) else []
    if not found:
        yield found
        return
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    said, pools = "", ""
    while True:
        with open_locked(gpu_lock("embedded"), wait=False) as is_mine:
            if is_mine:
                waits_for = _claimants(spec, found, least)
                if not waits_for:
                    yield found
                    return
                pools = ", ".join(sorted({claimant.pool for claimant in waits_for}))
        if time.monotonic() >= until:
            raise CapacityTimeoutError(
                f"the GPUs of this machine did not become free within {timeout_s:g} s (run_config.timeout). Embedded "
                f"pools of this user have claimed them: {pools or 'a pool that is just starting'}. Wait until their "
                "jobs have ended, cancel these jobs, or set a longer timeout"
            )
        if pools != said:
            say(
                f"waiting for the GPUs of this machine, which the embedded pools of other calls have claimed: {pools}. "
                "The wait ends when the jobs of these pools have ended"
            )
            said = pools
        time.sleep(_LOOK_S)


def _claimants(spec: PoolSpec, found: Sequence[Gpu], least: int) -> list[Claimant]:
    """Return the nodes of embedded pools that have to release their GPUs before the given pool can start.

    The result is empty if the pool can start now, or if it would have too few GPUs even after those nodes have ended.
    """
    free, claimants = look(found)
    needed = spec.gpus_per_node if spec.gpus_per_node > 0 else least
    # If a job is submitted again, its embedded pool may already be up. This pool already has its GPUs and need not
    # wait.
    is_up = any(claimant.pool == spec.name and claimant.store in ("", store_here()) for claimant in claimants)
    if free >= needed or is_up:
        return []
    # If this process runs on a node, do not wait for that node, because it cannot end before this process.
    own = os.environ.get(NODE_TAG)
    ending = [claimant for claimant in claimants if claimant.embedded and claimant.node != own]
    return ending if free + len(ending) >= needed else []
