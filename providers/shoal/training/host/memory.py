"""What this process may use and has used of its machine's memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

from shoal.training.host import cgroup

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# What glibc gives back as soon as it is freed: single blocks of 1 MiB, such as a decoded row group, and what is free
# beyond 4 MiB at the heap's end. Left to itself it raises both to tens of MiB when the first such block is freed; at
# 256 KiB each, reading took half as long again.
_LARGE_BLOCK_BYTES = 2**20
_FREE_END_BYTES = 4 * 2**20


def spare() -> None:
    """Has what is freed go back to the system from now on; does nothing where the C library is not glibc.

    Arrow's own allocator and glibc keep most of it, each where the other cannot use it: one of two workers on 2 M x 28
    grew by 139 MB so and kept 65 MB of it afterwards; with this it grew by 130 MB and kept nothing, in the same time.
    Arrow heeds it only where it is not imported yet.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _FREE_END_BYTES)


def trim() -> None:
    """Gives back what is free in the midst of what is not; a matter of milliseconds, for the end of a training."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def available_bytes() -> int:
    """Memory in bytes that can still be had: the machine's, or the container's or this process's if that is less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        available = max(0, min(available, most - psutil.Process().memory_info().data))
    room = cgroup.room_bytes()
    return available if room is None else min(available, room)


def explained(message: str) -> str:
    """A library's message, of C++'s word for a lack of memory also what to do.

    Args:
        message: What it said.
    """
    if "bad_alloc" not in message:
        return message
    return f"{message} (out of memory: use more nodes or larger ones, or fewer workers on each)"


def reset_peak() -> int:
    """Starts the peak anew, so that a process that trains twice reports each run's own, where the kernel allows it.

    Returns:
        The resident size in bytes from which it starts.
    """
    import psutil

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Highest resident size of this process in bytes since :func:`reset_peak`, or since its start."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
