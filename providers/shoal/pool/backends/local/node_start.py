"""Start one local node: import what the node needs, claim its GPUs, wait for a turn, and start it. Log a failed start.

All functions run in the node's supervisor process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.errors import CapacityError
from shoal.node_register import NodeRegister, RegisteredNode
from shoal.pool.backends import versions
from shoal.pool.backends.local import gpus
from shoal.pool.backends.local.backend import token_path
from shoal.pool.backends.local.job_server import JobServer
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.endpoint import MLFLOW_STORE, NO_GCS, REGISTER
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import GPU_PATIENCE, SUPERVISOR_PERIOD
from shoal.state.home import open_locked
from shoal.state.private_folders import turn_lock
from shoal.state.schema import Node

if TYPE_CHECKING:
    from shoal.pool.backends.local.raylet import Raylet

log = logging.getLogger("shoal.supervisor")

STARTS_AT_ONCE = (os.cpu_count() or 1) + 1
"""Number of nodes that may start at the same time on this host: one more than the host has cores. A starting node keeps
one core busy with the imports of its agents. When the node has to wait, another node can use the core."""


class Member(Protocol):
    """Interface through which a supervisor watches and ends its running node: a Ray node, a node without Ray, or a
    small substitute process in the crash tests."""

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's addresses as a dict from name to address. The supervisor writes this dict to the node's
        row."""

    def dead(self) -> str | None:
        """Return the reason why the node cannot be used any more, or None if the node works."""

    def busy(self) -> bool:
        """Return whether work is running on the node."""

    def drain(self, seconds: float, reason: str) -> None:
        """Stop giving new work to the node."""

    def stop(self) -> None:
        """End the node."""


Start = Callable[[Node, PoolSpec, str | None, Path], Member]
"""Function that starts a node. Its arguments are the node's row, the pool's spec, the address of the head (None if the
node is the head; the folder of the register of nodes if the pool runs without Ray), and the node's folder."""

Load = Callable[[PoolSpec], Start]
"""Function that imports all modules needed to start a node of a pool, and returns the function that starts the node.
Importing and starting are separate, because any number of nodes may import at the same time, but the number of
concurrent starts is limited (`STARTS_AT_ONCE`)."""


def load_node(spec: PoolSpec) -> Start:
    """Import the modules that a pool's nodes need, such as Ray, and return a function that starts a node."""
    from shoal.pool.backends.local.job_server import JobServer

    def job_server(spec: PoolSpec, folder: Path) -> JobServer:
        asked = spec.library_names()
        libraries = [*asked, *(["ray"] if asked and spec.ray else []), *([MLFLOW_STORE] if "mlflow" in asked else [])]
        return JobServer(folder, token_path(spec.name).read_text().strip(), libraries)

    if not spec.ray:

        def start_without_ray(node: Node, spec: PoolSpec, register: str | None, folder: Path) -> Member:
            if register is not None:
                return NodeWithoutRay(node, NodeRegister(Path(register)), folder)
            head = NodeWithoutRay(node, NodeRegister(NodeRegister.path_in(folder)), folder)
            jobs = job_server(spec, folder)
            return Head(head, jobs, jobs.busy)

        return start_without_ray
    from shoal.pool.backends.local.raylet import Raylet

    def start(node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> Member:
        if gcs or spec.ray_dashboard:
            return Raylet(node, spec, gcs, folder)
        # If the fork server of the job server has libraries to import, it does so while Ray starts.
        jobs = job_server(spec, folder) if spec.libraries else None
        try:
            raylet = Raylet(node, spec, gcs, folder)
            return Head(raylet, jobs or job_server(spec, folder), raylet.busy)
        except BaseException:
            if jobs:
                jobs.close()
            raise

    return start


def claim_gpus(
    node: Node, wanted: int, folder: Path, *, embedded: bool, check: Callable[[], object], pause: Callable[[], None]
) -> gpus.GpuClaim:
    """Lock the node's GPUs, and hide all other GPUs from the node's processes. If too few GPUs are free, wait up to
    `GPU_PATIENCE` seconds, because another node may be about to release some.

    Raises:
        CapacityError: Too few GPUs are free.
    """
    until = time.monotonic() + GPU_PATIENCE
    while True:
        try:
            claim = gpus.claim(wanted, node, folder, embedded=embedded)
            break
        except CapacityError:
            if time.monotonic() > until:
                raise
            check()
            pause()
    claim.show_only_these()
    node.gpus = len(claim.gpus)
    return claim


def in_turn(start: Callable[[], Member], *, check: Callable[[], object], stopping: Callable[[], bool]) -> Member:
    """Wait until fewer than `STARTS_AT_ONCE` other nodes of this host are starting, then start the node.

    The limit is needed because Ray allows 30 s for a start, and many concurrent starts would take longer. Each
    supervisor locks one of `STARTS_AT_ONCE` files (a turn) until its node has joined the cluster. Imports take place
    before this, without a lock.
    """
    looked = -SUPERVISOR_PERIOD
    while True:
        # This loop runs 20 times per second, but reads the row only once per second, because each query takes CPU time
        # from the nodes that are starting.
        if stopping() or time.monotonic() - looked > SUPERVISOR_PERIOD:
            check()
            looked = time.monotonic()
        for turn in range(STARTS_AT_ONCE):
            with open_locked(turn_lock(turn), wait=False) as mine:
                if mine:
                    check()
                    return start()
        time.sleep(0.05)


def log_failure(node: str, error: Exception) -> str:
    """Log that a node could not start or has failed, and return the error for the node's row."""
    log.error("%s failed", node, exc_info=error)
    hints = [hint for hint in (_load(error), versions.untested_ray()) if hint]
    return f"{type(error).__name__}: {error}" + (f" ({'; '.join(hints)})" if hints else "")


def _load(error: Exception) -> str | None:
    """Return the load of this machine, if the start has taken longer than Ray allows: it does where many processes
    run."""
    if not isinstance(error, TimeoutError) and "timed out" not in str(error):
        return None
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return (
        f"the load average of this machine is {load:.1f}, with {cpus} CPUs: if other work keeps it busy, start the "
        "node again later, or start fewer nodes"
    )


class Head:
    """The head node of a pool, which also runs the drivers of jobs; with Ray, instead of Ray's dashboard.

    Args:
        node: The head as a node.
        jobs: Server that runs the drivers of jobs.
        busy: Function that returns whether the head is in use.
    """

    def __init__(self, node: Raylet | NodeWithoutRay, jobs: JobServer, busy: Callable[[], bool]) -> None:
        self._node = node
        self._jobs = jobs
        self.dead = node.dead
        self.busy = busy
        self.drain = node.drain

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's addresses, including the URL of the Job API (``api``)."""
        return {**self._node.endpoint, "api": self._jobs.url}

    def stop(self) -> None:
        """End the drivers of jobs and the node."""
        self._jobs.close()
        self._node.stop()


class NodeWithoutRay:
    """A node of a pool without Ray, which is a part of its supervisor process. The drivers of jobs start their workers
    as plain processes, and reserve the CPUs in the pool's register of nodes.

    Args:
        row: The node's row.
        register: Register of the pool's nodes.
        folder: The node's folder.
    """

    def __init__(self, row: Node, register: NodeRegister, folder: Path) -> None:
        environment = {NODE_TAG: row.id, "TMPDIR": str(folder)}
        entry = RegisteredNode(row.id, row.name, row.is_head, row.cpus, str(folder), os.getpid(), environment)
        self._register = register
        self._registration = register.add(entry)
        self.busy = self._registration.is_in_use
        self.stop = self._registration.remove

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the folder of the register. The entries for Ray's address and Ray's node id are empty, because the
        pool runs without Ray."""
        return {REGISTER: str(self._register.folder), "gcs": NO_GCS, "ray_node_id": ""}

    def dead(self) -> str | None:
        """Return None. This node is a part of its supervisor process, so it cannot die while the supervisor runs."""
        return None

    def drain(self, seconds: float, reason: str) -> None:
        """Let drivers place no new workers on the node, and tell those of running jobs that it will shut down."""
        self._registration.leave_soon()
