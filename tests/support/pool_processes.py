"""Looking at the machine: what of a home's pools is there, processes and rows and folders."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from sqlalchemy import select

from shoal.os_processes import ProcessId
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state import Store, home
from shoal.state.private_folders import node_folders, node_ids
from shoal.state.schema import Node
from shoal.training.host.own_process import WORKER
from tests.support.waiting import wait_until


def node_rows() -> list[Node]:
    with Store().transaction() as session:
        return list(session.scalars(select(Node).order_by(Node.created_at)))


class Process(NamedTuple):
    """A process of this machine.

    Attributes:
        pid: Its id.
        environment: What it was started with, as `NAME=value` each.
        command: Its program and arguments, each with a zero byte behind.
    """

    pid: int
    environment: list[bytes]
    command: bytes

    def is_of_home(self) -> bool:
        """Whether it was started for this home."""
        return f"SHOAL_HOME={home()}".encode() in self.environment

    def is_of_node(self) -> bool:
        """Whether it was started for a node of this home."""
        return self.is_of_home() and any(entry.startswith(f"{NODE_TAG}=".encode()) for entry in self.environment)


def living() -> Iterator[Process]:
    """All processes but this one, those that have ended and those of other users."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid() or ProcessId.of(int(folder.name)) is None:
            continue
        with suppress(OSError):  # ended meanwhile, or another user's
            environment = (folder / "environ").read_bytes().split(b"\0")
            yield Process(int(folder.name), environment, (folder / "cmdline").read_bytes())


def processes_of_home() -> list[str]:
    """Command lines of all that was started for this home, detached or not."""
    return [process.command.replace(b"\0", b" ").decode() for process in living() if process.is_of_home()]


def tagged() -> list[int]:
    """Processes of any node of this home, by their environment."""
    return [process.pid for process in living() if process.is_of_node()]


def folders() -> list[str]:
    return node_ids()


def node_processes(node: Node) -> list[ProcessId]:
    supervisor = ProcessId.from_json(node.supervisor) if node.supervisor else None
    return processes.of_node(node.id, node_folders(node.id), supervisor)


def kill_supervisor(node: Node) -> None:
    """SIGKILL a node's supervisor, and wait until the kernel has carried that out."""
    supervisor = ProcessId.from_json(node.supervisor)
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: not supervisor.alive(), f"the end of the supervisor of {node.name}")


def a_worker() -> psutil.Process | None:
    """One of a gang that trains a boosting model on a node of this home, and of no other on this machine."""
    started = [
        process.pid for process in living() if process.command.startswith(WORKER.encode()) and process.is_of_home()
    ]
    return psutil.Process(started[0]) if started else None


def nothing_left() -> None:
    """No row, process or folder of any node of this home."""
    assert [(node.name, node.state) for node in node_rows()] == []
    assert tagged() == []
    assert folders() == []
