"""How long ago a stored value was written, counted by a clock that neither jumps nor runs while a machine is suspended.

Stored times are wall-clock times. Comparing one with the clock of now cancelled jobs after a suspend and after a change
of the clock. So whatever may end something after a time keeps a stamp beside the value: all processes of one boot share
the monotonic clock. A stamp of the present time tells later by how much the wall clock has jumped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from shoal.state.host import boot_id

_ONE_INSTANT_S = 0.1
"""The most that two readings of clocks may be apart to count as one; they are microseconds apart."""


def monotonic() -> float:
    """Seconds since this host's boot, without the time that it was suspended."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch by this host's clock, which may be set and goes on during a suspend."""
    return time.time()


def stamp(value: float) -> dict[str, Any]:
    """Note that a value is being written now.

    Args:
        value: The value, such as ``last_polled_at``. A writer of shoal 0.1 changes the value and leaves the stamp: then
            the stamp does not count any more.
    """
    return {"clock": _clock_id(), "at": monotonic(), "of": value}


def age(value: float, stamped: Mapping[str, Any] | None) -> float | None:
    """Seconds since a value was written; None where another host, another boot or shoal 0.1 wrote it.

    Args:
        value: The value.
        stamped: Its stamp.
    """
    if stamped is None or stamped["of"] != value or stamped["clock"] != _clock_id():
        return None
    return monotonic() - float(stamped["at"])


def present() -> dict[str, Any]:
    """Stamp of the present time, to compare with a later one by :func:`jump`."""
    while True:
        at, now = monotonic(), wall()
        if monotonic() - at < _ONE_INSTANT_S:  # otherwise this process was stopped between the two
            return {"clock": _clock_id(), "at": at, "of": now}


def jump(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    """Compute by how many seconds the wall clock jumped between two stamps of the present time.

    A suspend counts as a jump ahead. None if the first stamp is missing, or of another host or boot.
    """
    if before is None or before["clock"] != after["clock"]:
        return None
    return float((after["of"] - before["of"]) - (after["at"] - before["at"]))


def shared_now(session: Session, now: float) -> float:
    """Seconds since the epoch by the clock that all hosts of a store share.

    Args:
        session: A transaction.
        now: The caller's clock, which counts for SQLite because that serves one host only.
    """
    if session.get_bind().dialect.name != "postgresql":
        return now
    with session.no_autoflush:  # a row that the caller is still filling in must not be written yet
        return float(session.scalars(select(func.extract("epoch", func.clock_timestamp()))).one())


@lru_cache(maxsize=1)
def _clock_id() -> str:
    """Which monotonic clock this process reads; a time namespace has one of its own."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel before 5.6
        namespace = ""
    return f"{boot_id()}/{namespace}"
