"""Processes and the host on which they run: identify them, start Python processes, say how a process ended.

A process is identified by boot id, pid and start time, because the kernel reuses pids. The Python processes import
nothing from the folder in which they are started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process. No other process has the same identity, even after the process has ended."""

    boot: str
    pid: int
    # Start time of the process, as in `ProcessStat`.
    start: int
    host: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a running process, or None if no process has this pid. Zombies count as ended."""
        stat = process_stat(pid)
        return None if stat is None else cls(boot_id(), pid, stat.start, host_id())

    @classmethod
    def mine(cls) -> ProcessId:
        """Return the identity of the calling process."""
        me = cls.of(os.getpid())
        assert me is not None
        return me

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ProcessId:
        """Create a process identity from the dict that :meth:`to_json` returned."""
        return cls(str(fields["boot"]), int(fields["pid"]), int(fields["start"]), str(fields["host"]))

    def to_json(self) -> dict[str, Any]:
        """Return this process identity as a dict that the store can save as JSON."""
        return asdict(self)

    def alive(self) -> bool:
        """Return whether the process with this identity still runs on the caller's host."""
        return self.of(self.pid) == self

    def known_dead(self) -> bool:
        """Return True if the process has certainly ended. Return False if it runs on this host, or may run on another
        host.

        This host cannot see whether a process of another host runs.
        """
        return self.host == host_id() and not self.alive()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def sleep_until_end(seconds: float, process: ProcessId | None = None) -> None:
    """Sleep for some seconds, but wake up when a process ends."""
    if process is not None and process.alive():
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(seconds * 1000)
            finally:
                os.close(descriptor)
            return
    time.sleep(seconds)


@dataclass(frozen=True)
class ProcessStat:
    """Session id and start time of a running process, as read from ``/proc/<pid>/stat``."""

    session: int
    """Id of the process's session."""
    start: int
    """Start time of the process, in clock ticks after boot; without /proc, in milliseconds since 1970."""


def process_stat(pid: int) -> ProcessStat | None:
    """Read a process's session and start time. Return None if the process has ended or is hidden from this user."""
    try:
        # The second field is the program's name in parentheses. The name may contain spaces and parentheses, so only
        # the text after the last parenthesis is split into fields.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # The process has ended, or it belongs to another user and is hidden, because /proc is mounted with hidepid=1.
        return None if has_proc() else _stat_without_proc(pid)
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessStat(session=int(fields[3]), start=int(fields[19]))


@lru_cache(maxsize=1)
def has_proc() -> bool:
    """Return whether this host has the folder /proc, which local pools need. macOS has none."""
    return Path("/proc/self/stat").exists()


def _stat_without_proc(pid: int) -> ProcessStat | None:
    import psutil  # takes 20 ms, and is not needed on Linux

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return ProcessStat(session=os.getsid(pid), start=round(process.create_time() * 1000))
    except (psutil.Error, ProcessLookupError, PermissionError):
        return None


_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Id of the pid namespace of processes outside of containers. The number is a constant of the Linux kernel
(PROC_PID_INIT_INO). Processes in containers usually have another namespace."""


def hostname() -> str:
    """Return the name of this host, for messages."""
    return socket.gethostname()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of the host's current boot. A process from an earlier boot has another boot id, and has ended.

    Without /proc the id is empty. There, start times are counted from 1970, so they differ between boots.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() if has_proc() else ""


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return the id of this host, or of the container in which this process runs, as 16 hexadecimal digits.

    The id is computed from the machine-id, or from the hostname if there is no machine-id. Containers of one image may
    have the same machine-id and the same hostname, but they have different pid namespaces. So in a container, the pid
    namespace and the boot id are included in the computation.
    """
    parts = [_machine_id() or hostname()]
    own = namespace("pid")
    if own not in ("", _INITIAL_PID_NAMESPACE):
        parts += [own, boot_id()]
    # The id is hashed because the manual page machine-id(5) asks programs not to show the machine-id itself.
    return sha256("/".join(["shoal", *parts]).encode()).hexdigest()[:16]


def _machine_id() -> str | None:
    for path in _MACHINE_IDS:
        try:
            found = Path(path).read_text().strip()
        except OSError:
            continue
        # Images of containers and virtual machines contain systemd's placeholder "uninitialized" instead of an id.
        if found and found != "uninitialized":
            return found
    return None


def namespace(kind: str) -> str:
    """Return the id of this process's namespace of a kind, such as ``pid``; empty if the host has none."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def python_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a Python interpreter with the given arguments.

    A file of the current folder that has the name of a module of the standard library would otherwise be run instead of
    this module. The option holds for this process only, so a user's script can import the modules in its own folder.
    """
    return [python, "-P", *arguments]


def start_python(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python process that can import this process's shoal.

    Args:
        arguments: Arguments of the interpreter.
        environment: Variables of the process. None: those of this process.
        options: Further arguments of `subprocess.Popen`.
    """
    variables = dict(os.environ if environment is None else environment)
    folders = import_folders(variables.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *folders])
    return subprocess.Popen(python_command(*arguments), env=variables, **options)


def import_folders(path: str) -> list[str]:
    """Return the folders in a value of PYTHONPATH, without empty names. For Python, an empty name, as in ``:/folder``,
    is the current folder."""
    return [folder for folder in path.split(os.pathsep) if folder]


def how_ended(code: int) -> str:
    """Return the end of a process as a phrase, such as "was killed by SIGSEGV" or "ended with exit code 3"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"


@contextlib.contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables until the end of the block, and then give them their earlier values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
