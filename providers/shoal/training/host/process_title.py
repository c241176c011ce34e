"""Show a title in place of a process's command line, as `ps` prints it."""

from __future__ import annotations

import ctypes
from pathlib import Path

WORKER = "shoal worker"
"""First words of the titles of workers."""

_ARG_START, _ARG_END = 45, 46
"""Positions of the bounds of the command line in memory among the fields of ``/proc/self/stat`` after the name."""


def set_title(title: str) -> None:
    """Show a title in place of the command line of this process. A title that is longer is cut off."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    # The kernel reads the command line from the memory of the process. Python has copied it at its start.
    if (room := end - start) > 0:
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)
