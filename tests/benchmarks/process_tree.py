"""The memory of a process and all that descends from it."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

_EVERY_SECONDS = 0.1


def tree_bytes(pid: int) -> int:
    """Memory of a process tree.

    Each page is counted once: what n processes share counts a n-th in each (PSS of proc_pid_smaps(5)), so that neither
    libraries nor Ray's object store count several times over.
    """
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(_pss(process.pid) for process in tree)


class PeakMemory:
    """Samples the memory of a process tree while the block runs.

    Args:
        pid: The root.

    Attributes:
        bytes: The highest sum seen.
    """

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
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
            self.bytes = max(self.bytes, tree_bytes(self._pid))
            # Reading costs time by the size of the processes: at most a tenth of a core.
            if self._ended.wait(max(_EVERY_SECONDS, 10 * (time.monotonic() - began))):
                return


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0  # it has ended
