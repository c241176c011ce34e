"""Read the database rows of a pool, make simple changes to them, delete old ones, and move their times after a jump of
the clock.

Every function of this package works inside the caller's transaction. So the rows of demands, operations and nodes
change together or not at all, and no process sees a part of a change.

Every transaction on a pool's rows, and every action on its processes or files, is one step (`JournalStep`). A process
may die before, during or after any step, and the next sweep continues from there. The crash tests kill a process at
every step. So every change of a pool has to be part of a step, or the tests do not cover it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import chain
from typing import Any, TypeVar

from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.orm import Session, load_only

from shoal.errors import PoolDownError, PoolElsewhereError, PoolNotFoundError
from shoal.os_processes import ProcessId, hostname
from shoal.pool.bound_host import ANYWHERE, bind_here, is_here, unrecorded
from shoal.pool.holder import job_holder, job_of
from shoal.pool.journal import usage
from shoal.pool.scaling_plan import Snapshot
from shoal.state import Store, home, stamps
from shoal.state.home import is_own_store
from shoal.state.schema import (
    JOB_ACTIVE,
    JOB_ENDED,
    Demand,
    Job,
    JobState,
    Lease,
    Node,
    NodeState,
    Operation,
    OperationState,
    Pool,
    PoolState,
    Size,
    Usage,
)
from shoal.state.store import At, act, transaction

_Row = TypeVar("_Row", Lease, Operation, Node)

_UNFINISHED = Job.state.in_(JOB_ACTIVE)


def pool_names(session: Session, *, embedded: bool = False) -> list[str]:
    """Return the names of all pools in alphabetical order. Pools that belong to one process (embedded pools) are
    included only if `embedded` is true."""
    rows = session.scalars(select(Pool).order_by(Pool.name))
    return [pool.name for pool in rows if embedded or pool.owner is None]


def unfinished_jobs(session: Session, pools: Collection[str]) -> list[Job]:
    """Load the unfinished jobs of some pools, with the columns that change while a process works on the job."""
    at = (Job.queued_at, Job.admitted_at, Job.heartbeat_at, Job.last_polled_at)
    query = select(Job).where(Job.pool.in_(pools), _UNFINISHED)
    return list(session.scalars(query.options(load_only(Job.state, Job.submitter, Job.driver, *at))))


def load(session: Session, name: str, *, lock: bool = True) -> Snapshot:
    """Load all rows of a pool.

    With `lock`, the pool's row is locked until the transaction ends, and the pool's times are corrected if the wall
    clock has jumped.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    session.flush()  # the rows that are read must have the changes of this transaction
    pool = session.get(Pool, name, with_for_update=lock, populate_existing=True)
    if pool is None:
        raise PoolNotFoundError(name, pool_names(session))
    if lock:
        follow_clock(session, pool)
    [found] = _snapshots(session, [pool], {name} if _works(session, name) else set())
    return found


def read(store: Store, name: str) -> Snapshot:
    """Load all rows of a pool in a transaction of its own, which only reads.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    with store.reading() as session:
        return load(session, name, lock=False)


def _works(session: Session, pool: str) -> bool:
    """Return whether an unfinished job uses a pool. One job without a driver is enough, so the others of a long queue
    are not read."""
    drivers = select(Job.driver).where(Job.pool == pool, _UNFINISHED)
    if session.execute(drivers.where(Job.driver.is_(None)).limit(1)).first() is not None:
        return True
    return any(map(_still_uses_pool, session.scalars(drivers.where(Job.driver.is_not(None)))))


def load_all(session: Session, names: Collection[str] | None = None) -> list[Snapshot]:
    """Load the rows of all pools, or of those with the given names, in alphabetical order, with one query per table and
    without locks."""
    query = select(Pool).order_by(Pool.name)
    pools = session.scalars(query if names is None else query.where(Pool.name.in_(names))).all()
    working = set(session.scalars(select(Job.pool).where(_UNFINISHED, Job.driver.is_(None)).distinct()))
    drivers = session.execute(select(Job.pool, Job.driver).where(_UNFINISHED, Job.driver.is_not(None)))
    return _snapshots(session, pools, working | {name for name, driver in drivers if _still_uses_pool(driver)})


def _snapshots(session: Session, pools: Sequence[Pool], working: Collection[str]) -> list[Snapshot]:
    """Load the rows of some pools; jobs use those in `working`."""
    names = [pool.name for pool in pools]

    def of(table: type[_Row]) -> dict[str, list[_Row]]:
        found: dict[str, list[_Row]] = {name: [] for name in names}
        for row in session.scalars(select(table).where(table.pool.in_(names)).order_by(table.created_at)):
            found[row.pool].append(row)
        return found

    leases, operations, nodes = of(Lease), of(Operation), of(Node)
    demands = {demand.pool: demand for demand in session.scalars(select(Demand).where(Demand.pool.in_(names)))}
    lasting = _lasting(session, list(chain(*leases.values())))
    return [
        Snapshot(
            pool=pool,
            demand=demands.get(pool.name),
            leases=tuple(leases[pool.name]),
            operations=tuple(operations[pool.name]),
            nodes=tuple(nodes[pool.name]),
            works=pool.name in working,
            lasting=lasting & {lease.id for lease in leases[pool.name]},
        )
        for pool in pools
    ]


def _still_uses_pool(driver: dict[str, Any] | None) -> bool:
    """Return whether an unfinished job still uses the pool. Return False if its driver (the process that runs the job)
    has died without recording the end of the job."""
    return driver is None or not ProcessId.from_json(driver).known_dead()


def _lasting(session: Session, leases: Collection[Lease]) -> frozenset[str]:
    """Return the ids of the leases that belong to an unfinished job, or to a job whose driver process still runs."""
    ids = [job_id for lease in leases if (job_id := job_of(lease.holder)) is not None]
    if not ids:
        return frozenset()
    found = session.execute(select(Job.pool, Job.id, Job.state, Job.driver).where(Job.id.in_(ids)))
    kept = {(pool, job_holder(job_id)) for pool, job_id, state, driver in found if _keeps_lease(state, driver)}
    return frozenset(lease.id for lease in leases if (lease.pool, lease.holder) in kept)


def _keeps_lease(state: JobState, driver: dict[str, Any] | None) -> bool:
    """Return whether a job keeps its lease, because its attempt has not ended or its driver still cleans up on this
    host.

    A driver first records the end of the attempt. Then it finishes the MLflow run and removes files, and the pool must
    not go down before that.
    """
    if state not in JOB_ENDED:
        return _still_uses_pool(driver)
    return driver is not None and ProcessId.from_json(driver).alive()


def require_here(pool: Pool) -> None:
    """Raise an error if a pool is bound to another machine, or if this home has not recorded it. Only that machine can
    start and end the pool's nodes.

    Raises:
        PoolElsewhereError: The pool is bound to another machine, or not recorded.
    """
    if not is_own_store():
        raise PoolElsewhereError(f'pool "{pool.name}" is in the store of a team: use it on a host of this team')
    if why := unrecorded(pool):
        raise PoolElsewhereError(why)
    if not is_here(pool):
        here = "another host with the same name" if pool.host == hostname() else hostname()
        raise PoolElsewhereError(
            f'pool "{pool.name}" is local to host {pool.host} and cannot be changed from {here}: use the pool on '
            f"{pool.host}; if that host never returns, `shoal pool delete {pool.name} --abandon` removes the pool"
        )


def adopt(pool: Pool) -> None:
    """Write this host's current name to the row of a pool that is bound to this host, because a host may be renamed."""
    if pool.host != ANYWHERE:
        bind_here(pool)


def require_up(pool: Pool) -> None:
    """Raise an error if a pool is not up.

    Raises:
        PoolDownError: The pool is not up, or is bound to another machine.
    """
    require_here(pool)
    if pool.state is not PoolState.UP:
        raise PoolDownError(f'pool "{pool.name}" is {pool.state.value}: `shoal pool up {pool.name}` starts it')


def forget(session: Session, gone: Sequence[str]) -> None:
    """Delete the rows of nodes that have ended."""
    session.execute(delete(Node).where(Node.id.in_(gone), Node.state == NodeState.ENDING))


def note_stuck(session: Session, problems: Mapping[str, str]) -> None:
    """Record in the rows of nodes, by their id, why they have not ended."""
    # One statement for all: a pool may end a hundred nodes at a time, and looks at them again and again.
    statement = update(Node).where(Node.id == bindparam("node")).values(error=bindparam("problem"))
    if problems:
        session.connection().execute(statement, [{"node": node, "problem": why} for node, why in problems.items()])


def confirm(session: Session, name: str, number: int, problem: str | None) -> None:
    """Record in a pool's row whether the backend has confirmed a decision about its size, unless there is a newer one.
    `problem` is the reason why it has not; None if it has."""
    pool = session.get(Pool, name, with_for_update=True, populate_existing=True)
    if pool is not None and pool.decision and pool.decision["number"] == number:
        pool.decision = {**pool.decision, "unconfirmed": problem}


def stop(session: Session, pool: Pool, now: float) -> None:
    """Change a pool's state to stopping if the pool is up. Delete its leases and its base demand (the size that `up` or
    `scale` has set)."""
    if pool.state is PoolState.UP:
        pool.state = PoolState.STOPPING
    pool.touched_at = now
    session.execute(delete(Demand).where(Demand.pool == pool.name))
    session.execute(delete(Lease).where(Lease.pool == pool.name))
    usage.follow_leases(session, pool.name, now)
    session.expire_all()


_TOLERANCE_S = 1.0
"""Largest difference in seconds between wall clock and monotonic clock that does not count as a jump. If NTP adjusts
the time gradually, both clocks change alike. If NTP sets the time at once, only the wall clock changes."""


def clock_has_jumped(pool: Pool) -> bool:
    """Return whether the wall clock has jumped since the times in the pool's database rows were last corrected.

    The result is False for rows of another host and rows from before a reboot, because their times cannot be corrected.
    """
    jump = stamps.jump(pool.clock, stamps.present())
    return jump is not None and abs(jump) > _TOLERANCE_S


def follow_clock(session: Session, pool: Pool) -> None:
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


__all__ = ["At", "JournalStep", "act", "transaction"]


class JournalStep(StrEnum):
    """One step of changing a pool. The members are in the order in which the steps of an operation happen."""

    REQUEST = "request"
    """Transaction: write a request (demand, lease, limits, `down`) and its operation."""
    WITHDRAW = "withdraw"
    """Transaction: roll back an operation for which its caller no longer waits."""
    INTEND = "intend"
    """Transaction: write the observed state of the nodes, the ended operations, and which nodes to start and end."""
    START = "start"
    """Action: start the planned nodes. For each local node, spawn a supervisor process."""
    CLAIM = "claim"
    """Transaction of the supervisor: write its identity to the node's row, and set the node's state to starting."""
    REPORT = "report"
    """Transaction of the supervisor: write that the node is ready, busy, idle, or has failed."""
    END = "end"
    """Action: end nodes, and search for their processes until none is found."""
    CONFIRM = "confirm"
    """Transaction: delete the rows of nodes that have ended."""
    TIDY = "tidy"
    """Transaction with an action inside: remove the token of a pool that is down, or a whole embedded pool."""
    CLEAR = "clear"
    """Action of a sweep (clean-up of a host): end a node that has no row in the database."""


KEEP_OPERATIONS = 100
"""Number of ended operations that are kept for each pool. Every read of the pool loads all these operations, so a
larger number would make each read slower."""

KEEP_SIZES = 1_000
"""Number of rows of the table `sizes` that are kept for each pool. The page draws all of them."""

KEEP_LOGS = 7 * 24 * 3600.0
"""Time for which the logs of ended nodes are kept: one week, so that logs of Friday can still be read on Monday."""

KEEP_USAGE = 400 * 24 * 3600.0
"""Time for which rows of the table `usage` are kept. A month can then be compared with the same month of last year."""

RETENTION_PERIOD = 3600.0
"""Interval at which the reconciler removes old logs and operations."""


def retain(store: Store, name: str, now: float) -> None:
    """Delete a pool's ended operations and recorded sizes (except the newest), and the old logs of its ended nodes.
    Also delete old rows of the table `usage` (the number of nodes of each lease and job), for all pools.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    with store.transaction() as session:
        nodes = {node.name for node in load(session, name).nodes}
        ended = select(Operation).where(Operation.pool == name, Operation.state != OperationState.OPEN)
        for operation in session.scalars(ended.order_by(Operation.created_at.desc()).offset(KEEP_OPERATIONS)):
            session.delete(operation)
        sizes = select(Size.id).where(Size.pool == name).order_by(Size.id.desc()).limit(KEEP_SIZES)
        session.execute(delete(Size).where(Size.pool == name, Size.id.not_in(sizes)))
        session.execute(delete(Usage).where(Usage.ended_at < now - KEEP_USAGE))
    # A ray:// pool has no log folder, so the loop finds no files. If another process deletes the same log at the same
    # time, the missing file is not an error.
    for log in (home() / "pools" / name / "logs").glob("*.log"):
        with suppress(FileNotFoundError):
            if log.stem not in nodes and now - log.stat().st_mtime > KEEP_LOGS:
                log.unlink()
