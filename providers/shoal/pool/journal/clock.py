"""Correct a pool's times after a jump of the wall clock. The wall clock jumps if the host is suspended, or if the clock
is set to another time.

Rows hold wall-clock times because they are displayed, and `shoal.pool.scaling_plan` compares them with the present
time. After a jump, that comparison would roll operations back and end nodes. So every transaction that changes a pool
first adds the jump to the pool's times. Then all remaining durations are as before, for every process that reads the
rows.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.pool.holder import is_here
from shoal.state import stamps
from shoal.state.schema import Node, Operation, OperationState, Pool

_TOLERANCE_S = 1.0
"""Largest difference in seconds between wall clock and monotonic clock that does not count as a jump. If NTP adjusts
the time gradually, both clocks change alike. If NTP sets the time at once, only the wall clock changes."""


def has_jumped(pool: Pool) -> bool:
    """Return whether the wall clock has jumped since the times in the pool's database rows were last corrected.

    The result is False for rows of another host and rows from before a reboot, because their times cannot be corrected.
    """
    jump = stamps.jump(pool.clock, stamps.present())
    return jump is not None and abs(jump) > _TOLERANCE_S


def follow(session: Session, pool: Pool) -> None:
    """Correct a pool's times after a jump of the wall clock: add the jump to the times of the pool, its nodes and its
    unfinished operations.

    The times of a pool of another host are not changed, because only that host compares them with its own clock.
    """
    if not is_here(pool):
        return
    present = stamps.present()
    jump = stamps.jump(pool.clock, present)
    if jump is not None and abs(jump) <= _TOLERANCE_S:
        return
    pool.clock = present
    if jump is not None:
        _add(jump, pool, "touched_at", "cooldown_until")
        for node in session.scalars(select(Node).where(Node.pool == pool.name)):
            _add(jump, node, "created_at", "spawned_at", "start_deadline", "drain_deadline", "leaving_at")
        open_ones = select(Operation).where(Operation.pool == pool.name, Operation.state == OperationState.OPEN)
        for operation in session.scalars(open_ones):
            _add(jump, operation, "deadline")
    session.flush()


def _add(jump: float, row: Pool | Node | Operation, *names: str) -> None:
    for name in names:
        if (time := getattr(row, name)) is not None:
            setattr(row, name, time + jump)
