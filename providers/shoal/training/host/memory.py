"""Memory of this process and its limit: measure the peak, return freed memory, and read the limits of the cgroup."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    room = room_bytes()
    return available if room is None else min(available, room)


def total_bytes() -> int:
    """Return this machine's memory in bytes, or the memory limit of this process's control groups if it is lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = limit_bytes()
    return total if limit is None else min(total, limit)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that no memory could be allocated: of Python, Arrow or C++."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


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
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    mount: Path
    limit: str
    usage: str
    cache: str
    """Name of the field in the file ``memory.stat`` with the size of the inactive file pages in bytes. The kernel drops
    these pages when memory is short, so they count as free memory."""
    events: str
    """Name of the file whose field ``oom_kill`` is the number of processes that the kernel has killed."""


_V1 = _Version(
    Path("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)
_V2 = _Version(Path(), "memory.max", "memory.current", "inactive_file", "memory.events")


def room_bytes() -> int | None:
    """Return how many bytes this process can allocate until a memory limit of its control groups is reached.

    The result is None if the control groups have no memory limit.
    """
    rooms = []
    for version, group in _groups():
        # There is no limit if the files of the group are missing (as in the root group), or if its limit is "max".
        with contextlib.suppress(OSError, ValueError):
            limit, usage = int((group / version.limit).read_text()), int((group / version.usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            rooms.append(limit - usage + int(stat.get(version.cache, 0)))
    return max(0, min(rooms)) if rooms else None


def limit_bytes() -> int | None:
    """Return the lowest memory limit of this process's control groups in bytes, or None if there is no limit."""
    limits = []
    for version, group in _groups():
        # There is no limit if the file is missing (as in the root group) or contains "max".
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / version.limit).read_text()))
    return min(limits, default=None)


class OomKills:
    """Counter of the processes of this process's control group that the kernel kills for lack of memory."""

    def __init__(self) -> None:
        self._before = _oom_kills()

    def told(self) -> str:
        """Return a phrase with the number of processes that were killed since this object was created; empty if there
        are none, or if the number is not known."""
        count = _oom_kills() - self._before
        processes = "1 process" if count == 1 else f"{count} processes"
        return f"the kernel has killed {processes} of the driver's container for lack of memory" if count > 0 else ""


def _oom_kills() -> int:
    for version, group in _groups():
        # The root group has no such file, and kernels before 4.13 count no kills.
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in (group / version.events).read_text().splitlines())["oom_kill"])
    return 0


def _groups() -> Iterator[tuple[_Version, Path]]:
    """Yield the control groups that count this process's memory, from the innermost to the outermost visible group."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        mount = _MOUNT / version.mount
        own = mount / path.lstrip("/")
        # In a container, /proc/self/cgroup may show the path that the group has on the host, and this path does not
        # exist inside the container. In this case the container's own group is at the mount point, so the mount point
        # is used.
        groups = [own, *own.parents] if own.is_dir() else [mount]
        yield from ((version, group) for group in groups if group.is_relative_to(mount))
