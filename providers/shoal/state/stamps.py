"""Clock stamps: compute the age of stored values, and jumps of the wall clock, with the monotonic clock.

Stored times are wall-clock times. Comparing them with the current wall clock ended jobs wrongly after a suspend and
after a change of the clock. So each time that can end a job or a lease has a stamp beside it, with a reading of the
monotonic clock. This clock does not jump, stops during a suspend, and is the same for all processes since one boot. A
stamp of the present time shows later by how much the wall clock has jumped.
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
"""Most seconds between two clock readings that count as one instant. Normally they are microseconds apart."""


def monotonic() -> float:
    """Return the seconds since this host's boot, without the time that it was suspended."""
    return time.monotonic()


def wall() -> float:
    """Return the seconds since the epoch by this host's wall clock. It can be set, and continues during a suspend."""
    return time.time()


def stamp(value: float) -> dict[str, Any]:
    """Return a stamp for a value that is being written now.

    Args:
        value: The value, such as ``last_polled_at``. The stamp contains it, because shoal 0.1 changes the value without
            the stamp. A stamp with another value is then ignored.
    """
    return {"clock": _clock_id(), "at": monotonic(), "of": value}


def age(value: float, stamped: Mapping[str, Any] | None) -> float | None:
    """Return the seconds since a value was written. None if another host, an earlier boot or shoal 0.1 wrote it.

    Args:
        value: The value.
        stamped: The value's stamp.
    """
    if stamped is None or stamped["of"] != value or stamped["clock"] != _clock_id():
        return None
    return monotonic() - float(stamped["at"])


def present() -> dict[str, Any]:
    """Return a stamp of the present time, to compare with a later one by :func:`jump`."""
    while True:
        at, now = monotonic(), wall()
        if monotonic() - at < _ONE_INSTANT_S:  # otherwise this process was paused between the two readings
            return {"clock": _clock_id(), "at": at, "of": now}


def jump(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    """Compute by how many seconds the wall clock jumped between two stamps of the present time.

    A suspend counts as a jump ahead. The result is None if the first stamp is missing, or of another host or boot.
    """
    if before is None or before["clock"] != after["clock"]:
        return None
    return float((after["of"] - before["of"]) - (after["at"] - before["at"]))


def shared_now(session: Session, now: float) -> float:
    """Return the seconds since the epoch by the clock that all hosts of a store share.

    For PostgreSQL, this is the server's clock. For SQLite, which serves only one host, it is `now`.

    Args:
        session: An open transaction.
        now: Seconds since the epoch by the caller's clock.
    """
    if session.get_bind().dialect.name != "postgresql":
        return now
    with session.no_autoflush:  # the caller may have added a row with missing fields, which must not be written yet
        return float(session.scalars(select(func.extract("epoch", func.clock_timestamp()))).one())


@lru_cache(maxsize=1)
def _clock_id() -> str:
    """Return an id of the monotonic clock that this process reads. Each time namespace has its own clock."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # Linux before 5.6 has no time namespaces
        namespace = ""
    return f"{boot_id()}/{namespace}"
