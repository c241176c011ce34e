"""Start processes that outlive the caller, find all processes of a node, and end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from shoal.new_files import create_folder
from shoal.os_processes import ProcessId, boot_id, host_id, process_stat

NODE_TAG = "SHOAL_NODE_ID"
"""Environment variable that every process of a node inherits, even if it starts its own session."""


_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execve(sys.argv[1], sys.argv[1:], os.environ)"


def spawn_detached(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
    """Start a process that outlives the caller, its process group and its terminal.

    The new process leads its own session and is a child of init, so it never becomes a zombie of the caller.

    Raises:
        OSError: The host could not start the process.
    """
    create_folder(log.parent)
    with log.open("ab") as sink:
        code = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            check=False,
            start_new_session=True,  # a driver's end must not take the program with the driver's session
        ).returncode
    # The exit code -SIGKILL is not an error. It means that the node was ended during this call, so the new process of
    # the node was killed before it started the program.
    if code not in (0, -signal.SIGKILL):
        raise OSError(f"{argv[0]} could not be started (exit code {code}); see {log}")


def of_node(node_id: str, folders: Collection[Path], supervisor: ProcessId | None) -> list[ProcessId]:
    """Find all processes that belong to a node, except the calling process.

    A process belongs to the node if it has any of three signs, because each sign alone misses some processes:

    - The environment variable `NODE_TAG`. Ray's agents overwrite it with their process title.
    - Files open for writing in one of the node's folders.
    - The supervisor's session. Job drivers have their own session.
    """
    session = None
    # The kernel does not reuse a pid while it is the id of a session. So if another process has the supervisor's pid
    # now, the supervisor's session has ended, and a session with this id belongs to the other process.
    if supervisor and supervisor.boot == boot_id() and ProcessId.of(supervisor.pid) in (None, supervisor):
        session = supervisor.pid
    tag = f"{NODE_TAG}={node_id}".encode()
    prefixes = tuple(f"{folder.resolve()}/" for folder in folders)
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        stat = process_stat(pid)
        if stat is None or pid == os.getpid():
            continue
        if (session is not None and stat.session == session) or _has_tag(pid, tag) or _has_open(pid, prefixes):
            found.append(ProcessId(boot_id(), pid, stat.start, host_id()))
    return found


def end_all(find: Callable[[], list[ProcessId]], *, patience: float) -> list[ProcessId]:
    """Send SIGKILL to all processes that the function `find` returns, until it returns no process.

    Returns:
        The processes that still run at the end; empty if all have ended.
    """
    until = time.monotonic() + patience
    while left := find():
        for process in left:
            process.signal(signal.SIGKILL)
        if time.monotonic() > until:
            return left
        time.sleep(0.02)  # Processes do not end immediately after SIGKILL, so wait before the next search.
    return []


def _has_tag(pid: int, tag: bytes) -> bool:
    try:
        return tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # The process has ended, or belongs to another user. So it is not counted as a process of the node.
        return False


def _has_open(pid: int, prefixes: tuple[str, ...]) -> bool:
    """Return whether a process has opened a file in one of the given folders for writing.

    Files open for reading are ignored, because a process that reads a node's log need not belong to the node.
    """
    try:
        return any(
            os.readlink(entry.path).startswith(prefixes) and _writes(pid, entry.name)
            for entry in os.scandir(f"/proc/{pid}/fd")
        )
    except OSError:
        return False


def _writes(pid: int, descriptor: str) -> bool:
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False
