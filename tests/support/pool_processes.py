"""Looking at the machine: what of a home's pools is there, processes and rows and folders."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from sqlalchemy import select

from shoal.pool import processes
from shoal.pool.processes import NODE_TAG, ProcessId
from shoal.state import Store, home
from shoal.state.runtime import node_folders, node_ids, runtime_root
from shoal.state.schema import Node
from tests.support.waiting import wait_until


def rows() -> list[Node]:
    with Store().transaction() as session:
        return list(session.scalars(select(Node).order_by(Node.created_at)))


def processes_of_home() -> list[str]:
    """Command lines of all that was started for this home, detached or not; the caller is left out."""
    mine = f"SHOAL_HOME={home()}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name != str(os.getpid()) and mine in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # no process, ended meanwhile, or another user's
            continue
    return found


def tagged() -> list[int]:
    """Processes of any node of this home, by their environment."""
    mine = f"SHOAL_HOME={home()}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or ProcessId.of(int(name)) is None:
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine in environ and any(entry.startswith(f"{NODE_TAG}=".encode()) for entry in environ):
            found.append(int(name))
    return found


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
    """One of a gang that trains on a node of this home, and of no other on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        if "ray::Worker" in " ".join(process.info["cmdline"] or ()):
            above = " ".join(part for parent in process.parents() for part in parent.cmdline())
            if str(runtime_root()) in above:
                return process
    return None


def nothing_left() -> None:
    """No row, process or folder of any node of this home."""
    assert [(node.name, node.state) for node in rows()] == []
    assert tagged() == []
    assert folders() == []
