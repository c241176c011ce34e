"""What of a home's nodes is on this machine that no row speaks for: processes, listening ports, folders, operations."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select

from shoal.os_processes import ProcessId
from shoal.state import Store
from shoal.state.private_folders import runtime_root
from shoal.state.schema import Node, Operation, OperationState
from tests.support.pool_processes import folders, living, node_processes, node_rows


@dataclass
class Watch:
    """Remembers the nodes that it saw, and their processes: what has lost row, folder and tag is still known here."""

    _nodes: dict[str, Node] = field(default_factory=dict)
    _processes: dict[str, set[ProcessId]] = field(default_factory=dict)

    def look(self) -> None:
        """Take note of what is there now."""
        for node in node_rows():
            self._nodes[node.id] = node
            self._processes.setdefault(node.id, set()).update(node_processes(node))

    def left_over(self) -> list[str]:
        """Everything that should not be there, a sentence each."""
        standing = {node.id: node for node in node_rows()}
        said = [f"folder {name} has no row" for name in folders() if name not in standing]
        said += [f"operation {operation.kind} {operation.id} is open" for operation in open_operations()]
        for node_id, node in self._nodes.items():
            if node_id in standing:
                continue
            alive = {process for process in self._processes[node_id] if process.alive()} | set(node_processes(node))
            said += [f"{_named(process.pid)} of ended node {node.name}" for process in alive]
        living = {process.pid for node in standing.values() for process in node_processes(node)}
        said += [f"{_named(pid)} of a node without a row" for pid in _of_home(tagged=True) if pid not in living]
        listening = _listeners()
        said += [
            f"{_named(pid)} listens on {', '.join(listening[pid])} for no node that there is"
            for pid in _of_home(tagged=False)
            if pid in listening and pid not in living
        ]
        return said

    def forget_ended(self) -> None:
        """Nodes that have ended and were seen to leave nothing."""
        standing = {node.id for node in node_rows()}
        self._nodes = {node_id: node for node_id, node in self._nodes.items() if node_id in standing}
        self._processes = {node_id: seen for node_id, seen in self._processes.items() if node_id in standing}


def open_operations() -> list[Operation]:
    with Store().reading() as session:
        return list(session.scalars(select(Operation).where(Operation.state == OperationState.OPEN)))


def _of_home(*, tagged: bool) -> list[int]:
    """Processes that carry this home in their environment, or its runtime root in their arguments; not the caller."""
    root = os.fsencode(runtime_root())
    return [
        process.pid
        for process in living()
        if root in process.command or (process.is_of_node() if tagged else process.is_of_home())
    ]


def _listeners() -> dict[int, list[str]]:
    """Pid -> addresses that it listens on."""
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    found: dict[int, list[str]] = {}
    for line in said.splitlines():
        columns = line.split()
        for part in columns[5].split("pid=")[1:] if len(columns) > 5 else ():
            found.setdefault(int(part.split(",")[0]), []).append(columns[3])
    return found


def _named(pid: int) -> str:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        arguments = "(ended)"
    return f"process {pid} ({arguments[:80].strip()})"
