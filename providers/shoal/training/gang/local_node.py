"""Make a worker that the driver has started a part of a node of a local pool.

A worker that Ray starts is a child process of the node's raylet (Ray's process on the node), and ends with it. A worker
that the driver starts on the same machine is made equal to it here. On a pool without Ray, a worker ends with the
supervisor of its node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shoal.node_register import NodeRegister, RegisteredNode
from shoal.training import cluster
from shoal.training.host import memory

_NICE = 15
"""Nice value of Ray's workers: the processes of the node answer first, also if the workers use all CPUs."""

_OOM_SCORE = 1000
"""Score of Ray's workers by which the kernel kills them first if memory runs out, and not a process of the node."""

_LEAST_MEMORY = 0.05
"""Part of the machine's memory, or of its container's limit, of which less is short: the limit of Ray's memory monitor.
The machine would next evict the programs that run, and answer no longer, or kill processes."""


class LocalNode(Protocol):
    """Node of a local pool, which a worker enters."""

    def enter(self) -> NodeWatch:
        """Make this process a process of the node.

        Raises:
            OSError: The node has ended.
        """


@dataclass(frozen=True, slots=True)
class NodeWithRay:
    """Node of a local pool with Ray. `raylet` is the process id of its raylet, and `environment` has the variables of
    its processes, which differ between the nodes of a pool."""

    folder: str
    raylet: int
    environment: Mapping[str, str]

    def enter(self) -> NodeWatch:
        """See `LocalNode.enter`."""
        raylet = os.pidfd_open(self.raylet)
        if name_of(self.raylet) != "raylet":
            raise ProcessLookupError(f"the raylet {self.raylet} has ended")
        file = _enter(self.folder, self.environment)
        os.nice(max(0, _NICE - os.nice(0)))
        with contextlib.suppress(OSError):  # a container may refuse this
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        return NodeWatch("raylet", raylet, file)


@dataclass(frozen=True, slots=True)
class NodeWithoutRay:
    """Node of a pool without Ray, and the folder of the pool's register of nodes."""

    register: Path
    node: RegisteredNode

    def enter(self) -> NodeWatch:
        """See `LocalNode.enter`."""
        supervisor = os.pidfd_open(self.node.supervisor)
        # The supervisor is looked up after the descriptor is open, so the process id is not that of a later process.
        register = NodeRegister(self.register)
        if not register.runs(self.node.id):
            raise ProcessLookupError(f"the supervisor {self.node.supervisor} has ended")
        cluster.use_register(register)
        return NodeWatch("supervisor", supervisor, _enter(self.node.folder, self.node.environment))


def _enter(folder: str, environment: Mapping[str, str]) -> int:
    """Set the environment of a node, and return the descriptor of a file in its folder. By this open file, the
    supervisor of the node finds and ends this process and its forks when the node ends."""
    file = os.open(Path(folder, "workers"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.environ.update(environment)
    tempfile.tempdir = None  # the driver may have looked up its own folder for temporary files
    return file


@dataclass(frozen=True, slots=True)
class NodeWatch:
    """What a worker watches of its node.

    Args:
        kind: Whether the process is the node's raylet or its supervisor.
        process: Descriptor that is readable when the process has ended.
        file: Descriptor of the file of the node's workers.
    """

    kind: Literal["raylet", "supervisor"]
    process: int
    file: int

    def must_free_memory(self) -> bool:
        """Return whether memory is short, and this worker has to end. The workers of a node end one after the other, as
        Ray's memory monitor ends its workers: when one has ended, memory may suffice for the others. A pool without Ray
        has no such limit."""
        if self.kind != "raylet" or memory.available_bytes() > _LEAST_MEMORY * memory.total_bytes():
            return False
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def name_of(pid: int) -> str:
    """Return the name of a process's program, as the kernel shows it; empty if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
