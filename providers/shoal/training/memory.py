"""What this process may use and has used of its machine's memory."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

# cgroup v2, then v1; the first that names a number is this container's limit.
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_USAGE_FILES = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def available_bytes() -> int:
    """Memory in bytes that can still be had: the machine's, or the container's or this process's if that is less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        available = max(0, min(available, most - psutil.Process().memory_info().data))
    for limit_file, usage_file in zip(_LIMIT_FILES, _USAGE_FILES, strict=True):
        try:
            room = int(limit_file.read_text()) - int(usage_file.read_text())
        except (OSError, ValueError):
            # Not this version of cgroups, or "max": no limit.
            continue
        return max(0, min(available, room))
    return available


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
