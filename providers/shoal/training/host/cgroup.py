"""Read the memory limits of this process's control groups (cgroups), which containers and services set, and how many
processes the kernel has killed there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    rooms = [room for version, group in _groups() if (room := _room(version, group)) is not None]
    return max(0, min(rooms)) if rooms else None


def limit_bytes() -> int | None:
    """Return the lowest memory limit of this process's control groups in bytes, or None if there is no limit."""
    limits = [limit for version, group in _groups() if (limit := _limit(version, group)) is not None]
    return min(limits) if limits else None


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


def _limit(version: _Version, group: Path) -> int | None:
    try:
        return int((group / version.limit).read_text())
    except (OSError, ValueError):
        # There is no limit: the file with the limit is missing (as in the root group) or contains "max".
        return None


def _room(version: _Version, group: Path) -> int | None:
    try:
        limit, usage = int((group / version.limit).read_text()), int((group / version.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # There is no limit: the files of the group are missing (as in the root group), or its limit is "max".
        return None
    return limit - usage + int(stat.get(version.cache, 0))
