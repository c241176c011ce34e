"""Measure the memory of this process, and return freed memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

from shoal.training.host import cgroup

# Numbers by which glibc's function mallopt(3) identifies its settings.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Two limits of glibc's allocator. With these values, glibc returns two kinds of freed memory to the operating system at
# once: blocks of at least 1 MiB, such as a decoded row group, and free memory beyond 4 MiB at the end of the heap. By
# default, glibc raises both limits to tens of MiB when the first large block is freed, and then keeps freed memory.
# Lower limits make reading slower: with limits of 256 KiB, it took 50 % longer.
_LARGE_BLOCK_BYTES = 2**20
_FREE_END_BYTES = 4 * 2**20


def trim_memory() -> None:
    """Make this process return freed memory to the operating system from now on.

    Call this function before Arrow is imported, because Arrow reads the setting at import. The settings of malloc need
    glibc; with another C library they are skipped.

    By default Arrow's allocator and glibc both keep most of the freed memory, and neither can use the memory that the
    other one keeps. Without these settings, one of two workers on 2 M rows x 28 columns grew by 139 MB and kept 65 MB
    afterwards. With these settings the worker grew by 130 MB and kept nothing, in the same time.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _FREE_END_BYTES)


def trim() -> None:
    """Return unused memory of this process to the operating system. The call takes milliseconds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes of memory that this process can still allocate.

    The result is the lowest of three values: the machine's free memory, the memory left below the limits of the control
    groups, and the memory left below the process's own limit (RLIMIT_DATA).
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        available = max(0, min(available, most - psutil.Process().memory_info().data))
    room = cgroup.room_bytes()
    return available if room is None else min(available, room)


def total_bytes() -> int:
    """Return this machine's memory in bytes, or the memory limit of this process's control groups if it is lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = cgroup.limit_bytes()
    return total if limit is None else min(total, limit)


def explained(message: str) -> str:
    """Add advice to a library's error message if the error is C++'s out-of-memory error."""
    if "bad_alloc" not in message:
        return message
    return f"{message} (out of memory: use more nodes or larger ones, or fewer workers on each)"


def reset_peak() -> int:
    """Reset the peak memory of this process, if the kernel allows it, so that each run reports its own peak.

    Returns:
        Current resident memory in bytes.
    """
    import psutil

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process in bytes since :func:`reset_peak`, or since its start."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
