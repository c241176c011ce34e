"""Identify a process for good.

A pid alone names nothing, because the kernel reuses it. A process here is boot id, pid and start time in kernel ticks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.state.host import boot_id, host_id


@dataclass(frozen=True)
class ProcessId:
    """One process, for good."""

    boot: str
    pid: int
    start: int  # clock ticks after boot
    host: str = field(default="", compare=False)  # identity of its host; empty in what shoal 0.1 wrote

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a process that runs now; None where there is none (a zombie has ended)."""
        stat = process_stat(pid)
        return None if stat is None else cls(boot_id(), pid, stat.start, host_id())

    @classmethod
    def mine(cls) -> ProcessId:
        """The identity of the calling process."""
        me = cls.of(os.getpid())
        assert me is not None
        return me

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ProcessId:
        """The reverse of :meth:`to_json`."""
        return cls(str(fields["boot"]), int(fields["pid"]), int(fields["start"]), str(fields.get("host", "")))

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the store."""
        return asdict(self)

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return self.of(self.pid) == self

    def known_dead(self) -> bool:
        """Whether it has certainly ended; False for a process of another host, which cannot be seen from here."""
        return self.host in ("", host_id()) and not self.alive()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class ProcessStat:
    """What the kernel says of a running process."""

    session: int
    """Id of its session."""
    start: int
    """When it started, in clock ticks after boot."""


def process_stat(pid: int) -> ProcessStat | None:
    """Read a process's session and start time; None where it has ended or cannot be seen."""
    try:
        # The name in the second field may hold spaces and parentheses: read on after the last one.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # ended, or of another user on a host that hides those (hidepid=1)
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessStat(session=int(fields[3]), start=int(fields[19]))
