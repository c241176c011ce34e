"""Read the rows of a pool, and change one thing in them.

Every function of this package works inside the caller's transaction: demand, operation and intents change together or
not at all, so that no process acts on half of what another wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session, defer

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.pool.holder import ANYWHERE, bind_here, is_here
from shoal.pool.journal import clock
from shoal.pool.plan import Snapshot
from shoal.state.host import hostname
from shoal.state.process import ProcessId
from shoal.state.schema import (
    JOB_ENDED,
    Demand,
    Job,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationState,
    Pool,
    PoolState,
)

_UNFINISHED = Job.state.not_in(JOB_ENDED)


def pool_names(session: Session, *, embedded: bool = False) -> list[str]:
    """Names of all pools, in order; pools embedded in a process only if asked for."""
    rows = session.scalars(select(Pool).order_by(Pool.name))
    return [pool.name for pool in rows if embedded or pool.owner is None]


def unfinished_jobs(session: Session, pools: Collection[str]) -> list[Job]:
    """Load the jobs of some pools that have not ended, without their specs and results, which may be large."""
    query = select(Job).where(Job.pool.in_(pools), _UNFINISHED).options(defer(Job.spec), defer(Job.result))
    return list(session.scalars(query))


def load(session: Session, name: str, *, lock: bool = True) -> Snapshot:
    """All rows of a pool, by default locked until the transaction ends, with times that have followed the wall clock.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    pool = session.get(Pool, name, with_for_update=lock, populate_existing=True)
    if pool is None:
        raise PoolNotFoundError(name, pool_names(session))
    if lock:
        clock.follow(session, pool)
    return Snapshot(
        pool=pool,
        demand=session.get(Demand, name),
        leases=tuple(session.scalars(select(Lease).where(Lease.pool == name).order_by(Lease.created_at))),
        operations=tuple(
            session.scalars(select(Operation).where(Operation.pool == name).order_by(Operation.created_at))
        ),
        nodes=tuple(session.scalars(select(Node).where(Node.pool == name).order_by(Node.created_at))),
        works=any(map(_works, session.scalars(select(Job.driver).where(Job.pool == name, _UNFINISHED)))),
    )


def _works(driver: dict[str, Any] | None) -> bool:
    """Whether an unfinished job is really there: its driver may have died with nobody to say so in its row."""
    return driver is None or not ProcessId.from_json(driver).known_dead()


def require_here(pool: Pool) -> None:
    """Refuse to act on a pool that is bound to another machine.

    Raises:
        PoolElsewhereError: It is bound to another machine.
    """
    if not is_here(pool):
        here = "another of the same name" if pool.host == hostname() else hostname()
        raise PoolElsewhereError(
            f'pool "{pool.name}" is local to host {pool.host} and cannot be changed from {here}: call from there; '
            f"if that host never returns, `shoal pool delete {pool.name} --abandon` removes the pool",
            pool.host,
        )


def adopt(pool: Pool) -> None:
    """Complete the host's identity in a row of shoal 0.1, and its name after the host was renamed."""
    if pool.host != ANYWHERE:
        bind_here(pool)


def require_up(pool: Pool) -> None:
    """Refuse to go on with a pool that is not up.

    Raises:
        PoolDownError: It is not, or bound to another machine.
    """
    require_here(pool)
    if pool.state is not PoolState.UP:
        raise PoolDownError(f'pool "{pool.name}" is {pool.state.value}: `shoal pool up {pool.name}` starts it')


def keep_newest_operations(session: Session, name: str, keep: int) -> None:
    """Delete a pool's ended operations but the newest; every look at the pool reads all there are."""
    ended = session.scalars(
        select(Operation)
        .where(Operation.pool == name, Operation.state != OperationState.OPEN)
        .order_by(Operation.created_at.desc())
        .offset(keep)
    )
    for operation in ended:
        session.delete(operation)


def forget(session: Session, gone: Sequence[str]) -> None:
    """Delete the rows of nodes whose end was seen."""
    session.execute(delete(Node).where(Node.id.in_(gone), Node.state == NodeState.ENDING))


def note_stuck(session: Session, node_id: str, problem: str) -> None:
    """Say on a node's row why it cannot be ended."""
    session.execute(update(Node).where(Node.id == node_id).values(error=problem))


def stop(session: Session, pool: Pool, now: float) -> None:
    """Want a pool down: its demand and leases go."""
    if pool.state is PoolState.UP:
        pool.state = PoolState.STOPPING
    pool.touched_at = now
    session.execute(delete(Demand).where(Demand.pool == pool.name))
    session.execute(delete(Lease).where(Lease.pool == pool.name))
    session.expire_all()
