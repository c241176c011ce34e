"""Memory limits of this process's control groups (cgroups), which containers and services set."""

from __future__ import annotations

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
    """Field of ``memory.stat``: bytes of inactive file pages, which the kernel drops when memory is short."""


_V1 = _Version(Path("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(Path(), "memory.max", "memory.current", "inactive_file")


def room_bytes() -> int | None:
    """Return the bytes until the lowest memory limit of this process's control groups, or None without a limit."""
    rooms = [room for version, group in _groups() if (room := _room(version, group)) is not None]
    return max(0, min(rooms)) if rooms else None


def limit_bytes() -> int | None:
    """Return the lowest memory limit of this process's control groups in bytes, or None without a limit."""
    limits = [limit for version, group in _groups() if (limit := _limit(version, group)) is not None]
    return min(limits) if limits else None


def _groups() -> Iterator[tuple[_Version, Path]]:
    """Yield the control groups that count this process's memory, from the innermost to the outermost visible one."""
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
        # A container may see the path of its group on the host, but not the host's groups. Its own group is then
        # mounted at the root.
        groups = [own, *own.parents] if own.is_dir() else [mount]
        yield from ((version, group) for group in groups if group.is_relative_to(mount))


def _limit(version: _Version, group: Path) -> int | None:
    try:
        return int((group / version.limit).read_text())
    except (OSError, ValueError):
        return None  # as in _room


def _room(version: _Version, group: Path) -> int | None:
    try:
        limit, usage = int((group / version.limit).read_text()), int((group / version.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # the root group of cgroup version 2 has no such files, and the limit "max" means no limit
    return limit - usage + int(stat.get(version.cache, 0))
