"""Record the number of ready and of demanded nodes of a pool whenever one of them changes (table `sizes`), and read
these numbers for the plot of the page.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.pool.journal import rows
from shoal.pool.scaling_plan import wanted
from shoal.pool.timeouts import SIZE_UNKNOWN_AFTER
from shoal.state import Store, stamps
from shoal.state.schema import NodeState, Pool, Size


def note(session: Session, name: str, now: float, *, has_looked: bool = False) -> None:
    """Record the size of a pool if it has changed. Every transaction that may change it calls this function as its last
    step.

    If no process has checked the nodes for `SIZE_UNKNOWN_AFTER` seconds, their rows may be wrong. The size is then
    recorded as unknown from the last check on, as soon as a process has checked them again.

    Args:
        session: Session of the caller's transaction.
        name: Name of the pool. It may be deleted.
        now: Present time of this host.
        has_looked: Whether the caller has checked the nodes of the pool, and written what it found to their rows.
    """
    session.flush()
    now = stamps.shared_now(session, now)
    if session.get(Pool, name) is None:
        return
    snapshot = rows.load(session, name, lock=False)
    last = session.scalars(select(Size).where(Size.pool == name).order_by(Size.id.desc()).limit(1)).first()
    size = (sum(node.state is NodeState.READY for node in snapshot.nodes), wanted(snapshot))
    known_until = now if last is None else _known_until(last, snapshot.pool, now)
    if last is not None and known_until < now:
        if not has_looked:
            return
        session.add(Size(pool=name, at=known_until, ready=last.ready, target=last.target))
        session.add(Size(pool=name, at=known_until))
    if last is None or known_until < now or (last.ready, last.target) != size:
        session.add(Size(pool=name, at=now, ready=size[0], target=size[1]))
    if has_looked:
        snapshot.pool.seen_at = now


def points(store: Store, name: str, now: float) -> list[tuple[float, int | None, int | None]]:
    """Return the sizes of a pool, the oldest first: time, ready nodes, demanded nodes. The last point is the time up to
    which the newest size is known."""
    with store.reading() as session:
        pool = session.get(Pool, name)
        sizes = list(session.scalars(select(Size).where(Size.pool == name).order_by(Size.id)))
        now = stamps.shared_now(session, now)
    found = [(row.at, row.ready, row.target) for row in sizes]
    if pool is not None and sizes:
        found.append((_known_until(sizes[-1], pool, now), *found[-1][1:]))
    return found


def _known_until(last: Size, pool: Pool, now: float) -> float:
    """Return the time up to which the newest size of a pool is known. If no node is ready and none is demanded, the
    size cannot change without a new row, so it is known until now."""
    checked_at = max(last.at, pool.seen_at or 0.0)
    is_known = not (last.ready or last.target) or now <= checked_at + SIZE_UNKNOWN_AFTER
    return max(now, last.at) if is_known else checked_at
