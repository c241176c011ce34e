"""Memory limits of containers, by the memory controller of cgroup v1 where this machine has it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/memory")


class MemoryLimits:
    """The groups of one node. Without the controller, containers have no limit."""

    def __init__(self, node: str) -> None:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        below = next((path for _, controllers, path in own if controllers == "memory"), None)
        self._folder = None if below is None else ROOT / below.lstrip("/") / node
        try:
            if self._folder:
                self._folder.mkdir(exist_ok=True)
        except OSError:
            self._folder = None

    def make(self, key: str, limit: int | None) -> str:
        """Make the group of a container; its folder, or "" if it has no limit."""
        if self._folder is None or limit is None:
            return ""
        group = self._folder / key
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit))
        return str(group)

    def exceeded(self, key: str) -> bool:
        """Whether the kernel has killed a process of this group for its memory."""
        if self._folder is None or not (control := self._folder / key / "memory.oom_control").exists():
            return False
        lines = dict(line.split() for line in control.read_text().splitlines())
        return int(lines.get("oom_kill", 0)) > 0

    def remove(self, key: str) -> None:
        """Remove the group of a container that has ended."""
        if self._folder:
            with suppress(OSError):
                (self._folder / key).rmdir()


def remove_groups(prefix: str) -> None:
    """Remove what nodes with this prefix have left: the agent is killed, and does not tidy."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for path in [path for _, controllers, path in own if controllers == "memory"]:
        for node in (ROOT / path.lstrip("/")).glob(f"{prefix}*"):
            for group in [*node.glob("*/"), node]:
                with suppress(OSError):
                    group.rmdir()
