"""Deadlines that survive a jump of the wall clock: a suspend, or a clock that is set, moves a pool's times along.

Rows hold wall-clock times, which is right for display, and a plan compares them with the present time. After a jump
that comparison would roll operations back and end nodes. So every transaction that changes a pool first adds the jump
to its times. From then on they mean again what they meant before, for every process that reads them.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.pool.holder import is_here
from shoal.state import stamps
from shoal.state.schema import Node, Operation, OperationState, Pool

_TOLERANCE_S = 1.0
"""Below this a difference between the clocks is no jump: NTP slews both alike, and steps the wall clock alone."""


def has_jumped(pool: Pool) -> bool:
    """Whether the wall clock has jumped since the pool's times last followed it.

    False in rows of shoal 0.1, of another host and from before a reboot: their times are compared as they are.
    """
    jump = stamps.jump(pool.clock, stamps.present())
    return jump is not None and abs(jump) > _TOLERANCE_S


def follow(session: Session, pool: Pool) -> None:
    """Add the jump of the wall clock to all times by which the pool, its nodes and open operations are judged.

    Does nothing to a pool of another host, because that host judges it by its own clock.

    Args:
        session: A write transaction, before it reads or writes any of these times.
        pool: The pool's row, locked.
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
            _add(jump, node, "created_at", "spawned_at", "start_deadline", "drain_deadline")
        open_ones = select(Operation).where(Operation.pool == pool.name, Operation.state == OperationState.OPEN)
        for operation in session.scalars(open_ones):
            _add(jump, operation, "deadline")
    session.flush()


def _add(jump: float, row: Pool | Node | Operation, *names: str) -> None:
    for name in names:
        if (time := getattr(row, name)) is not None:
            setattr(row, name, time + jump)
