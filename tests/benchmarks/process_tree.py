"""The memory of several processes: of one and all that descends from it, or of all that were given a variable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import psutil

_EVERY_SECONDS = 0.1


def tree(pid: int) -> list[int]:
    """Return the ids of a process and of all that descends from it; none if it has ended."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def tree_bytes(pid: int) -> int:
    """Return the memory of a process tree in bytes, with each page counted once."""
    return sum(map(_pss, tree(pid)))


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of all processes that were started with an environment variable of this value.

    The daemons of a pool do not descend from the process that started the pool, but they inherit its variables.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process.pid)
    return found


class PeakMemory:
    """Samples the memory of processes while the block runs.

    Each page is counted once: what n processes share counts a n-th in each (PSS of proc_pid_smaps(5)), so that neither
    libraries nor Ray's object store count several times over.

    Args:
        processes: Returns the ids of the processes; it is called for each sample.

    Attributes:
        bytes: The highest sum seen.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self.bytes = 0
        self._processes = processes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            began = time.monotonic()
            self.bytes = max(self.bytes, sum(map(_pss, self._processes())))
            # Reading costs time by the size of the processes: at most a tenth of a core.
            if self._ended.wait(max(_EVERY_SECONDS, 10 * (time.monotonic() - began))):
                return


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0  # it has ended
