"""Read the queues of pools, and admit waiting attempts. An admitted attempt has left the queue and may start now.

A waiting attempt has no process; it exists only as a row in the store. An attempt joins the queue after its credentials
were written into a file in `$SHOAL_HOME` (`shoal.jobs.credentials.hand_over`). Any process of the pool's host may admit
an attempt in the queue, and then sends the attempt to the head. Admission checks in one transaction whether there is
room and writes the row, so that two processes never give the same room to two attempts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from sqlalchemy import Text, cast, select, update
from sqlalchemy.orm import Session

from shoal.jobs import scheduling
from shoal.jobs.journal.attempts import Key, get, note_polled
from shoal.jobs.journal.stages import Event, Stage, may, not_admitted, stage_of
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.scheduling import Entry, Place, Room, drivers_in
from shoal.os_processes import ProcessId
from shoal.pool.holder import Ancestors, ends_with, job_of
from shoal.pool.journal import usage
from shoal.pool.scaling_plan import kept_for
from shoal.state import Store, stamps
from shoal.state.databases import load_json
from shoal.state.schema import JOB_ACTIVE, Demand, Job, JobState, Lease, Node, NodeState, Pool
from shoal.training.demand import GangClaim, NodeSize
from shoal.training.host import memory


@dataclass(frozen=True)
class Line:
    """State of a pool's queue at one moment.

    Attributes:
        places: Place in the queue of each waiting attempt.
        free_for: The waiting attempts that may start now because there is room for them, the first one first.
        has_nodes: Whether the pool has a ready node.
    """

    places: dict[Key, Place]
    free_for: list[Key]
    has_nodes: bool


class Admission(Enum):
    """Result of :func:`admit`: whether the attempt may start now."""

    NOW = auto()
    """This call has admitted the attempt, so the caller must now send it to the head."""
    BEFORE = auto()
    """The attempt had been admitted or had ended before this call, which has changed nothing."""
    WAITS = auto()
    """The attempt waits in the queue, because another attempt comes first or there is no room for the attempt."""


def admit(store: Store, key: Key, now: float, endpoint: Mapping[str, str]) -> Admission:
    """Put an attempt into its pool's queue unless it is already in the queue, and admit the attempt if it may start
    now.

    The attempt may start if no other attempt comes before it and there is room for it (see `shoal.jobs.scheduling`).
    """
    # The function first decides in a read transaction, because a write transaction makes all other writers wait. In a
    # new process and with 100 waiting attempts, the decision takes 120 ms of CPU.
    with store.reading() as session:
        job = get(session, key, lock=False)
        if not may(job, Event.ADMIT):
            return Admission.BEFORE
        may_start = _may_start(session, job, now)
    if not may_start:
        if job.queued_at is None:
            # The UPDATE is the transaction's only statement, so that other writers wait for a short time only. An
            # attempt that is already in the queue, or has ended, does not change.
            joins = (
                update(Job)
                .where(Job.id == key.job_id, Job.attempt == key.attempt, *not_admitted(is_queued=False))
                .values(queued_at=now, queued_clock=stamps.stamp(now))
                .execution_options(synchronize_session=False)
            )
            with transaction(store, JobStep.ADMIT) as session:
                session.execute(joins)
        return Admission.WAITS
    with transaction(store, JobStep.ADMIT) as session:
        job = get(session, key)
        if not may(job, Event.ADMIT):
            return Admission.BEFORE
        if job.queued_at is None:
            job.queued_at, job.queued_clock = now, stamps.stamp(now)
        if not _may_start(session, job, now):
            return Admission.WAITS
        job.admitted_at, job.endpoint = now, dict(endpoint)
        # This process becomes the submitter of the job. The field "python" keeps its value from the first submitter: it
        # is the path of the Python interpreter that runs the driver.
        job.submitter = job.submitter | ProcessId.mine().to_json()
        note_polled(job, now)
        return Admission.NOW


def free_gang(store: Store, key: Key, now: float, used: tuple[int, float]) -> None:
    """Record that a running attempt no longer needs CPUs and GPUs, so that they count as free for the waiting attempts.

    The attempt's driver still counts as running.
    """
    with transaction(store, JobStep.FREE) as session:
        job = get(session, key)
        job.gang = GangClaim(workers=0, cpus=0, gpus=0).to_json()
        if job.state is JobState.RUNNING:
            nodes, seconds = used
            usage.job_uses(session, job, nodes, now, since_s=seconds)
            usage.job_uses(session, job, 1, now)


def why_waited_too_long(job: Job, now: float) -> str | None:
    """Return the error of an attempt that has waited in the queue for longer than the timeout in its run_config; None
    if it may wait longer.
    """
    timeout = job.run_config.get("timeout")
    if timeout is None or job.queued_at is None:
        return None
    waited = stamps.age(job.queued_at, job.queued_clock)
    if (now - job.queued_at if waited is None else waited) <= float(timeout):
        return None
    return (
        f'the job waited for room on pool "{job.pool}" for longer than its run_config.timeout: raise the timeout, or '
        "use another pool"
    )


def put_back(store: Store, key: Key) -> None:
    """Put an admitted attempt back into the queue, at its old place; do nothing if it is not pending any more."""
    with transaction(store, JobStep.ADMIT) as session:
        job = get(session, key)
        if may(job, Event.PUT_BACK):
            job.admitted_at = None


def look(store: Store, pool: str) -> Line:
    """Return the present state of a pool's queue.

    The function only makes two small queries outside a transaction. The state may already be old, which does no harm,
    because `admit` checks again in a transaction.
    """
    with store.reading(snapshot=False) as session:
        entries = _entries(session, pool, _kept_nodes(session, pool))
        room = _room(session, pool)
    free_for = [Key(*entry.key) for entry in scheduling.next_up(entries, room)]
    return Line(_places(entries), free_for, has_nodes=bool(room.nodes))


_FRESH_S = 1.0
"""Age in seconds of a look that waits share."""
_sharing = threading.Lock()
_shared: dict[tuple[str, str], tuple[float, Line]] = {}


def shared_look(store: Store, pool: str) -> Line:
    """Return what :func:`look` returns, at most a second old: the many waits of one process read a queue once."""
    with _sharing:
        now = time.monotonic()
        for key in [key for key, (seen_at, _) in _shared.items() if now - seen_at > _FRESH_S]:
            del _shared[key]
        if (store.url, pool) not in _shared:
            _shared[store.url, pool] = now, look(store, pool)
        return _shared[store.url, pool][1]


def places(store: Store) -> dict[Key, Place]:
    """Return the place of each waiting attempt in its pool's queue, for all pools, with a single query."""
    with store.reading(snapshot=False) as session:
        pools = _entries_by_pool(session, None)
    return {key: place for entries in pools.values() for key, place in _places(entries).items()}


def pools_with_queue(store: Store) -> set[str]:
    """Return the names of the pools on which an attempt waits."""
    return set(store.scalars(select(Job.pool).where(*not_admitted(is_queued=True)).distinct()))


def _places(entries: list[Entry]) -> dict[Key, Place]:
    line = scheduling.in_order(entries)
    running = len(entries) - len(line)
    return {Key(*entry.key): Place(position, len(line), running) for position, entry in enumerate(line, 1)}


def _may_start(session: Session, job: Job, now: float) -> bool:
    """Return whether an attempt may start: there is room for it, and no other attempt comes before it."""
    kept = _kept_nodes(session, job.pool)
    mine = _entry(job, now if job.queued_at is None else job.queued_at, waits=True, kept=kept)
    others = [entry for entry in _entries(session, job.pool, kept) if entry.key != mine.key]
    return mine in scheduling.next_up([*others, mine], _room(session, job.pool))


def _entries(session: Session, pool: str, kept: _KeptNodes) -> list[Entry]:
    return _entries_by_pool(session, pool, kept).get(pool, [])


def _entries_by_pool(session: Session, pool: str | None, kept: _KeptNodes | None = None) -> dict[str, list[Entry]]:
    """Return the running and waiting attempts of each pool, by the pool's name.

    Without `kept`, the entries have no `most_nodes`, which is needed only to decide whether there is room.

    Only the needed columns are read, because specs are large, and so whole rows are slow to read.
    """
    query = select(
        Job.pool,
        Job.id,
        Job.attempt,
        Job.holder,
        Job.ancestors,
        Job.priority,
        Job.queued_at,
        Job.admitted_at,
        Job.state,
        cast(Job.gang, Text).label("gang"),
    ).where(Job.state.in_(JOB_ACTIVE))
    if pool is not None:
        query = query.where(Job.pool == pool)
    found: dict[str, list[Entry]] = {}
    for row in session.execute(query):
        stage = stage_of(row)
        if stage is Stage.UNQUEUED:
            continue
        entry = _entry(row, row.queued_at or 0.0, waits=stage is Stage.WAITING, kept=kept)
        found.setdefault(row.pool, []).append(entry)
    return found


def _entry(row: Any, queued_at: float, *, waits: bool, kept: _KeptNodes | None) -> Entry:
    most = kept(row.id, row.holder, row.ancestors) if kept else None
    gang = _gang(row.gang) if isinstance(row.gang, str) else GangClaim(**row.gang)
    return Entry((row.id, row.attempt), row.holder, row.priority, queued_at, waits, gang, most)


@lru_cache(maxsize=1000)
def _gang(written: str) -> GangClaim:
    """Return the group of workers from its JSON, which many jobs have in common."""
    return GangClaim(**load_json(written))


def kept_nodes(store: Store, job: Job) -> int | None:
    """Return how many nodes a job uses if it asks for all nodes; None if it may use all.

    A pool with leases of several runs gets smaller when one of them ends. A job that used the nodes of other leases
    would lose workers then, and its number of workers would depend on the other runs.
    """
    with store.reading(snapshot=False) as session:
        return _kept_nodes(session, job.pool)(job.id, job.holder, job.ancestors)


_KeptNodes = Callable[[str, str, Ancestors | None], int | None]


def _kept_nodes(session: Session, pool: str) -> _KeptNodes:
    """Return a function that returns for a job's id, holder and ancestors what `kept_nodes` returns."""
    leases = list(session.scalars(select(Lease).where(Lease.pool == pool)))
    if len(leases) < 2:
        return lambda job_id, holder, ancestors: None
    sizes = select(Pool.min_nodes, Demand.size).outerjoin(Demand, Demand.pool == Pool.name).where(Pool.name == pool)
    least = max((size or 0 for size in session.execute(sizes).one_or_none() or ()), default=0)

    def kept(job_id: str, holder: str, ancestors: Ancestors | None) -> int | None:
        return kept_for(
            leases,
            least,
            lambda lease: job_of(lease.holder) == job_id or ends_with(holder, ancestors, lease.holder),
        )

    return kept


def _room(session: Session, pool: str) -> Room:
    query = select(Node.cpus, Node.gpus, Node.is_head, Node.endpoint).where(
        Node.pool == pool, Node.state == NodeState.READY
    )
    nodes = session.execute(query).all()
    # The row of a ray:// pool's head has the memory size of the head's machine. The row of a local pool's head has no
    # memory size, but a local pool's drivers run on this host, so this host's memory counts.
    of_head = [int((node.endpoint or {}).get("memory_bytes", 0)) for node in nodes if node.is_head]
    drivers = drivers_in(max(of_head, default=0) or _memory_here())
    return Room(drivers, tuple(NodeSize(node.cpus, node.gpus) for node in nodes))


@lru_cache(maxsize=1)
def _memory_here() -> int:
    return memory.total_bytes()
