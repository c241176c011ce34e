"""Start a node's processes detached, find all of them, and end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from shoal.state.host import boot_id
from shoal.state.process import ProcessId, process_stat

NODE_TAG = "SHOAL_NODE_ID"
"""Environment variable that every process of a node inherits, whatever session it moves to."""


_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execve(sys.argv[1], sys.argv[1:], os.environ)"


def spawn_detached(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
    """Start a process that outlives the caller, its process group and its terminal.

    It leads a session of its own and is a child of init at once, so the caller keeps no zombie of it.

    Args:
        argv: Program (an absolute path) and arguments.
        env: Its whole environment.
        log: File that its standard output and error are appended to.

    Raises:
        OSError: The host lets no process start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        code = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            check=False,
        ).returncode
    # Killed: somebody ended the node whose tag it carries before it was even started, which is no failure of ours.
    if code not in (0, -signal.SIGKILL):
        raise OSError(f"{argv[0]} could not be started (exit code {code}); see {log}")


def of_node(node_id: str, folders: Collection[Path], supervisor: ProcessId | None) -> list[ProcessId]:
    """Every process that belongs to a node, the caller left out.

    Three signs, because each misses some: the environment tag (Ray's agents overwrite theirs with their title), files
    open for writing under one of the node's folders, and the supervisor's session (job drivers have their own).
    """
    session = supervisor.pid if supervisor and supervisor.boot == boot_id() and _owns_session(supervisor) else None
    tag = f"{NODE_TAG}={node_id}".encode()
    prefixes = tuple(f"{folder.resolve()}/" for folder in folders)
    found = []
    for pid in _pids():
        stat = process_stat(pid)
        if stat is None or pid == os.getpid():
            continue
        if (session is not None and stat.session == session) or _has_tag(pid, tag) or _has_open(pid, prefixes):
            found.append(ProcessId(boot_id(), pid, stat.start))
    return found


def end_all(find: Callable[[], list[ProcessId]], *, patience: float) -> list[ProcessId]:
    """SIGKILL what `find` finds until it finds nothing.

    Args:
        find: Looks anew at each call, so that what was being forked meanwhile is found too.
        patience: Seconds to keep trying (a process in an uninterruptible call takes its time).

    Returns:
        What is still there at the end: empty when all have ended.
    """
    until = time.monotonic() + patience
    while left := find():
        for process in left:
            process.signal(signal.SIGKILL)
        if time.monotonic() > until:
            return left
        time.sleep(0.02)  # the kernel takes them down in the background
    return []


def _owns_session(supervisor: ProcessId) -> bool:
    """False when the pid now leads somebody else's session; the kernel reuses no pid that is still a session's id."""
    now = ProcessId.of(supervisor.pid)
    return now is None or now == supervisor


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _has_tag(pid: int, tag: bytes) -> bool:
    try:
        return tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return False


def _has_open(pid: int, prefixes: tuple[str, ...]) -> bool:
    """Whether a process writes below one of some folders; one that reads a log there, or removes it, does not."""
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
