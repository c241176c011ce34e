"""Make a worker that the driver has started a part of a node of a local pool with Ray.

A worker that Ray starts is a child process of the node's raylet (Ray's process on the node), and ends with it. A worker
that the driver starts on the same machine is made equal to it here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.training.host import memory

_NICE = 15
"""Nice value of Ray's workers: the processes of the node answer first, also if the workers use all CPUs."""

_OOM_SCORE = 1000
"""Score of Ray's workers by which the kernel kills them first if memory runs out, and not a process of the node."""

_LEAST_MEMORY = 0.05
"""Part of the machine's memory, or of its container's limit, of which less is short: the limit of Ray's memory monitor.
The machine would next evict the programs that run, and answer no longer, or kill processes."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """Node of a local pool on this machine.

    Args:
        folder: Folder of the node.
        raylet: Process id of the node's raylet.
        environment: Environment variables of the node's processes, which differ between the nodes of a pool.
    """

    folder: str
    raylet: int
    environment: Mapping[str, str]

    def enter(self) -> NodeWatch:
        """Make this process a process of the node.

        Raises:
            OSError: The node has ended.
        """
        raylet = os.pidfd_open(self.raylet)
        if name_of(self.raylet) != "raylet":
            raise ProcessLookupError(f"the raylet {self.raylet} has ended")
        # By this open file, the supervisor of the node finds and ends this process and its forks when the node ends.
        file = os.open(Path(self.folder, "workers"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.environ.update(self.environment)
        tempfile.tempdir = None  # the driver may have looked up its own folder for temporary files
        os.nice(max(0, _NICE - os.nice(0)))
        with contextlib.suppress(OSError):  # a container may refuse this
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        return NodeWatch(raylet, file)


@dataclass(frozen=True, slots=True)
class NodeWatch:
    """What a worker watches of its node.

    Args:
        raylet: Descriptor that is readable when the raylet has ended.
        file: Descriptor of the file of the node's workers.
    """

    raylet: int
    file: int

    def must_free_memory(self) -> bool:
        """Return whether memory is short, and this worker has to end. The workers of a node end one after the other, as
        Ray's memory monitor ends its workers: when one has ended, memory may suffice for the others."""
        if memory.available_bytes() > _LEAST_MEMORY * memory.total_bytes():
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
