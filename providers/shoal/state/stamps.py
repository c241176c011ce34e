"""Use the monotonic clock to measure how old stored values are, and by how much the wall clock has jumped.

Stored times are wall-clock times. When they were compared with the current wall clock, jobs were ended wrongly after
the host was suspended, or after its clock was changed. So each stored time that can end a job or a lease has a stamp in
a second column. A stamp is a reading of the monotonic clock. The monotonic clock does not jump, stops while the host is
suspended, and is the same for all processes of one boot. So the age of a stored time is the difference between two
readings of the monotonic clock. Two stamps with the present time show by how much the wall clock has jumped between
them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from shoal.os_processes import boot_id, namespace
from shoal.own_pauses import paused_after, waited_since

_ONE_INSTANT_S = 0.1
"""Largest time in seconds between two clock readings that count as simultaneous. Normally some microseconds pass
between them, and more only if the process was paused."""


def monotonic() -> float:
    """Return the seconds since this host's boot, without the time during which the host was suspended."""
    return time.monotonic()


def wall() -> float:
    """Return the seconds since the epoch by this host's wall clock.

    The wall clock can be changed by an administrator, and goes on while the host is suspended.
    """
    return time.time()


def stamp(value: float, *, ago: float = 0.0) -> dict[str, Any]:
    """Return a stamp (a reading of the monotonic clock). The caller stores the stamp together with a value that is
    written now.

    Returns:
        The stamp: the id of the monotonic clock, its reading in seconds, and the value.
    """
    return {"clock": _clock_id(), "at": monotonic() - ago, "of": value}


def age(value: float, stamped: Mapping[str, Any] | None) -> float | None:
    """Return how many seconds ago a stored value was written, computed from the value's stamp (the reading of the
    monotonic clock that is stored beside the value).

    Returns:
        The age in seconds. None if the age cannot be measured, because the value was written by another host, or
        before the last reboot.
    """
    if stamped is None or stamped["of"] != value or stamped["clock"] != _clock_id():
        return None
    return monotonic() - float(stamped["at"])


def silence(value: float, stamped: Mapping[str, Any] | None) -> float | None:
    """Return for how many seconds a value was not renewed while this process could have seen it: like :func:`age`, but
    counted from the end of this process's own last pause."""
    measured = age(value, stamped)
    return None if measured is None else waited_since(monotonic() - measured, monotonic())


def present() -> dict[str, Any]:
    """Return a stamp with the present time by the monotonic clock and by the wall clock, for :func:`jump`."""
    while True:
        at, now = monotonic(), wall()
        # If the process was paused between the readings of the two clocks, both clocks are read again.
        if monotonic() - at < _ONE_INSTANT_S:
            return {"clock": _clock_id(), "at": at, "of": now}


def jump(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    """Compute by how many seconds the wall clock jumped between two calls of :func:`present`.

    If the host was suspended or this process was paused between the stamps, this counts as a jump ahead.

    Returns:
        The jump in seconds. None if the earlier stamp is missing, or is of another host or boot.
    """
    if before is None or before["clock"] != after["clock"]:
        return None
    return float((after["of"] - before["of"]) - (after["at"] - before["at"])) + paused_after(before["at"])


def shared_now(session: Session, now: float) -> float:
    """Return the present time by the clock of the PostgreSQL server, in seconds since the epoch, so that all hosts use
    the same time.

    A SQLite file is used by only one host, so for SQLite the result is `now`.
    """
    if session.get_bind().dialect.name != "postgresql":
        return now
    # Without `no_autoflush`, SQLAlchemy would first write the rows that the caller has added to the session but not yet
    # filled in.
    with session.no_autoflush:
        return float(session.scalars(select(func.extract("epoch", func.clock_timestamp()))).one())


@lru_cache(maxsize=1)
def _clock_id() -> str:
    """Return an id of the monotonic clock that this process reads: the boot id and the time namespace.

    Only readings of the same clock can be compared. Containers may have their own time namespace, and thus their own
    monotonic clock.
    """
    # Without a boot id (on macOS), other processes' readings may be of an earlier boot, so none is comparable.
    # Linux before 5.6 has no time namespaces. On such a host, all processes of a boot read the same clock, so the boot
    # id identifies the clock.
    return f"{boot_id() or uuid.uuid4().hex}/{namespace('time')}"
