"""The first steps of a container: make its namespaces, build its file system, then become its command.

Run as a program with one argument, the file that `container.Container` writes. It imports nothing but the standard
library: with `-I -S`, Python starts fast. `unshare --fork` would not do: it exits with 1 if its child is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HIDDEN = ("/tmp", "/run")
"""Folders of the machine that a container sees empty."""


NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000
"""For mounts, the host's name, IPC and processes: CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID."""

PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Start the container, and end as its command ends."""
    told = json.loads(Path(sys.argv[1]).read_text())
    if told["cgroup"]:
        Path(told["cgroup"], "cgroup.procs").write_text("0")
    if libc.unshare(NAMESPACES):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    if (child := os.fork()) == 0:
        _become(told)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _become(told: dict[str, Any]) -> None:
    """Build the file system, change into it, and execute the command."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    socket.sethostname(told["hostname"])
    _mount("--make-rprivate", "/")
    _enter(_root(told["layers"]), told)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["working_folder"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        os.execvp(told["command"][0], told["command"])
    except OSError as error:
        print(f"exec: {told['command'][0]!r}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _root(layers: str) -> str:
    """Mount a root that shows the machine's file system and keeps what is written to it, and return it."""
    root = f"{layers}/root"
    # What a container writes lies in memory: the upper folder of an overlay must not lie in the lower one.
    _mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", layers)
    for name in ("upper", "work", "root"):
        os.mkdir(f"{layers}/{name}")
    _mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work", "overlay", root)
    _mount("--rbind", "/dev", f"{root}/dev")
    _mount("--rbind", "/sys", f"{root}/sys")
    _mount("-t", "proc", "proc", f"{root}/proc")
    _mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", f"{root}/run")
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", f"{root}/dev/shm")
    return root


def _enter(root: str, told: dict[str, Any]) -> None:
    """Make the root that of this process, and mount folders of the machine in it."""
    os.mkdir(f"{root}/run/old")
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "run/old"], check=True)
    os.chdir("/")
    _bind(told["temp"], "/tmp", read_only=False)
    hidden = tuple(f"{folder}/" for folder in HIDDEN)
    for path in [*told["visible"], told["image"]]:
        if path.startswith(hidden):
            # Python keeps what it compiles in its environment: otherwise each start would take a minute.
            _bind(path, path, read_only=path != told["image"])
    for mount in told["mounts"]:
        _bind(mount["source"], mount["target"], mount["read_only"])
    subprocess.run(["umount", "--lazy", "/run/old"], check=True)
    os.rmdir("/run/old")
    os.makedirs(told["working_folder"], exist_ok=True)


def _bind(source: str, target: str, read_only: bool) -> None:
    # The target may lie behind a link, such as /var/run: so this runs in the new root.
    source = f"/run/old{source}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount("--bind", source, target)
    if read_only:
        _mount("-o", "remount,bind,ro", target)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
