"""Register the nodes of a pool without Ray, and reserve their CPUs, in files of the head's folder.

All nodes of such a pool are on one machine. Each node has one file, with two kinds of locks, which the kernel releases
when their process ends, however it ends: the supervisor locks the file (`flock`) as long as the node runs, and each
driver locks one byte for each CPU that its workers use (an open file description lock).
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_FOLDER = "nodes"
"""Name of the register's folder in the head's folder."""

_LEAVING = ".leaving"
"""Suffix of the empty file beside that of a node that gets no new work."""

_FLOCK = "@hhqqi4x"
"""Layout of the kernel's `struct flock`: type, whence, start, length, process id."""


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A node of a pool without Ray.

    Args:
        id: Id of the node's row.
        name: Name of the node.
        is_head: Whether the node is the head.
        cpus: Number of CPUs.
        folder: Folder of the node.
        supervisor: Process id of the node's supervisor.
        environment: Environment variables that differ between the nodes of a pool.
    """

    id: str
    name: str
    is_head: bool
    cpus: int
    folder: str
    supervisor: int
    environment: Mapping[str, str]


class NodeRegister:
    """The register of one pool.

    Args:
        folder: Folder of the register, from :meth:`path_in`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def path_in(head: Path) -> Path:
        """Return the register's folder in the folder of the pool's head."""
        return head / _FOLDER

    def add(self, node: RegisteredNode) -> Registration:
        """Register a node of the calling process.

        Raises:
            OSError: The file cannot be written, for example because the head has ended.
        """
        if node.is_head:
            self.folder.mkdir(mode=0o700)
        for file in self._files():
            with suppress(FileNotFoundError):
                if not _is_locked(file):  # that of a lost node
                    file.unlink()
                    file.with_suffix(_LEAVING).unlink(missing_ok=True)
        # The file gets its name when it is locked, so that a file without a lock is always that of an ended node.
        new = self.folder / f"{node.id}.new"
        new.write_text(json.dumps(asdict(node)))
        # The descriptor is open for reading only: processes that have a file of the head's folder open for writing are
        # killed when the head ends.
        descriptor = os.open(new, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(self._file(node.id))
        return Registration(self._file(node.id), descriptor)

    def nodes(self) -> list[RegisteredNode]:
        """Return the nodes that run: first the head, then the others, sorted by name."""
        found = []
        for file in self._files():
            with suppress(FileNotFoundError):
                if _is_locked(file):
                    found.append(RegisteredNode(**json.loads(file.read_text())))
        return sorted(found, key=lambda node: (not node.is_head, node.name, node.id))

    def runs(self, node_id: str) -> bool:
        """Return whether a node runs."""
        with suppress(FileNotFoundError):
            return _is_locked(self._file(node_id))
        return False

    def is_leaving(self, node_id: str) -> bool:
        """Return whether a node gets no new work, because it will shut down soon."""
        return self._file(node_id).with_suffix(_LEAVING).exists()

    def free_cpus(self, node: RegisteredNode) -> int:
        """Return the number of CPUs of a node that no driver has reserved; 0 if the node has ended."""
        with suppress(FileNotFoundError), _opened(self._file(node.id), os.O_RDONLY) as descriptor:
            return sum(not _has_lock(descriptor, cpu, 1) for cpu in range(node.cpus))
        return 0

    @contextmanager
    def reserving(self) -> Iterator[bool]:
        """Keep other drivers from reserving CPUs in the ``with`` block. Yield False if another driver is just doing it,
        or if the head has ended."""
        try:
            descriptor = os.open(self.folder, os.O_RDONLY)
        except FileNotFoundError:
            yield False
            return
        try:
            yield _lock(descriptor)
        finally:
            os.close(descriptor)

    def reserve(self, node: RegisteredNode, cpus: int) -> int | None:
        """Reserve CPUs of a node for the calling process, inside of :meth:`reserving`.

        Returns:
            A descriptor. When it is closed, the CPUs are free again. None if the node has not as many free CPUs.
        """
        with suppress(FileNotFoundError), ExitStack() as at_end:
            descriptor = os.open(self._file(node.id), os.O_RDWR)
            at_end.callback(os.close, descriptor)
            # The byte after those of the CPUs shows that the node is in use, also by workers that need no CPU.
            _set_lock(descriptor, fcntl.F_RDLCK, node.cpus)
            for cpu in range(node.cpus):
                if not cpus:
                    break
                cpus -= _set_lock(descriptor, fcntl.F_WRLCK, cpu)
            if not cpus:
                at_end.pop_all()
                return descriptor
        return None

    def _file(self, node_id: str) -> Path:
        return self.folder / f"{node_id}.json"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))


class Registration:
    """The entry of a running node in the register, which its supervisor owns.

    Args:
        file: File of the node.
        descriptor: Descriptor that locks the file.
    """

    def __init__(self, file: Path, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor

    def is_in_use(self) -> bool:
        """Return whether a driver has reserved CPUs of the node for its workers."""
        return _has_lock(self._descriptor, 0, 0)

    def leave_soon(self) -> None:
        """Let drivers place no new workers on the node."""
        with suppress(FileNotFoundError):  # the head has ended
            self._file.with_suffix(_LEAVING).touch()

    def remove(self) -> None:
        """Remove the entry; further calls have no effect."""
        for file in (self._file, self._file.with_suffix(_LEAVING)):
            file.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_locked(file: Path) -> bool:
    with _opened(file, os.O_RDONLY) as descriptor:
        return not _lock(descriptor, fcntl.LOCK_SH)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _set_lock(descriptor: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _has_lock(descriptor: int, start: int, length: int) -> bool:
    """Return whether another process has locked one of `length` bytes; a length of 0 means all bytes from `start`
    on."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
