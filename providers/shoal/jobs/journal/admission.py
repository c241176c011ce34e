"""Read the queues of pools, and admit waiting attempts: the row of an attempt is all there is of it while it waits.

An attempt joins the queue once its credentials lie in the home (`shoal.jobs.credentials.hand_over`). From then on any
process of the pool's host may admit and send it. Admitting checks the room and writes the row in one transaction, so
that two processes never give the same room to two attempts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.jobs import queue
from shoal.jobs.journal.attempts import Key, get, note_polled
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.queue import Entry, Gang, NodeSize, Room
from shoal.state import Store, stamps
from shoal.state.process import ProcessId
from shoal.state.schema import JOB_ACTIVE, Job, JobState, Node, NodeState
from shoal.training.host import memory


@dataclass(frozen=True)
class Place:
    """The place of an attempt in its pool's queue.

    Attributes:
        position: 1 for the attempt that starts next.
        waiting: Number of attempts that wait.
        running: Number of attempts that run.
    """

    position: int
    waiting: int
    running: int

    def __str__(self) -> str:
        run = "1 job runs" if self.running == 1 else f"{self.running} jobs run"
        return f"position {self.position} of {self.waiting} in the queue, {run}"


@dataclass(frozen=True)
class Line:
    """The queue of a pool at one moment.

    Attributes:
        places: Places of the waiting attempts.
        free_for: The waiting attempts that there is room for now, in the order in which they start.
        has_nodes: Whether the pool has a ready node.
    """

    places: dict[Key, Place]
    free_for: list[Key]
    has_nodes: bool


class Admission(Enum):
    """Result of :func:`admit`."""

    NOW = auto()
    """This call has admitted the attempt; the caller has to send it to the head."""
    BEFORE = auto()
    """The attempt was admitted or ended before."""
    WAITS = auto()
    """It is not the attempt's turn, or there is no room for it."""


def admit(store: Store, key: Key, now: float, endpoint: Mapping[str, str]) -> Admission:
    """Put an attempt into its pool's queue unless it is there, and admit it if it is its turn and there is room.

    Args:
        store: Store that has the attempt's row.
        key: The attempt.
        now: Seconds since the epoch.
        endpoint: Addresses of the pool's head now; the head may have been replaced while the attempt waited.

    Raises:
        JobError: There is no such attempt.
    """
    with transaction(store, JobStep.ADMIT) as session:
        job = get(session, key)
        if job.state is not JobState.PENDING or job.admitted_at is not None:
            return Admission.BEFORE
        if job.queued_at is None:
            job.queued_at, job.queued_clock = now, stamps.stamp(now)
            session.flush()
        free_for = queue.next_up(_entries(session, job.pool), _room(session, job.pool))
        if (job.id, job.attempt) not in (entry.key for entry in free_for):
            return Admission.WAITS
        job.admitted_at, job.endpoint = now, dict(endpoint)
        job.submitter = (job.submitter or {}) | ProcessId.mine().to_json()  # keeps the Python of the first submitter
        note_polled(job, now)
        return Admission.NOW


def put_back(store: Store, key: Key) -> None:
    """Let an admitted attempt wait again, at its old place in the queue; do nothing if it is not pending any more.

    Raises:
        JobError: There is no such attempt.
    """
    with transaction(store, JobStep.ADMIT) as session:
        job = get(session, key)
        if job.state is JobState.PENDING:
            job.admitted_at = None


def look(store: Store, pool: str) -> Line:
    """Read the queue of a pool; two small queries, and no transaction: `admit` decides again in one."""
    with store.reading(snapshot=False) as session:
        entries = _entries(session, pool)
        room = _room(session, pool)
    free_for = [Key(*entry.key) for entry in queue.next_up(entries, room)]
    return Line(_places(entries), free_for, has_nodes=bool(room.nodes))


def places(store: Store) -> dict[Key, Place]:
    """Return the places of the waiting attempts of all pools; one query."""
    with store.reading(snapshot=False) as session:
        pools = _entries_by_pool(session, None)
    return {key: place for entries in pools.values() for key, place in _places(entries).items()}


def pools_with_queue(store: Store) -> set[str]:
    """Return the names of the pools with a waiting attempt."""
    with store.reading(snapshot=False) as session:
        pools = _entries_by_pool(session, None)
    return {pool for pool, entries in pools.items() if any(entry.waits for entry in entries)}


def _places(entries: list[Entry]) -> dict[Key, Place]:
    line = queue.in_order(entries)
    running = len(entries) - len(line)
    return {Key(*entry.key): Place(position, len(line), running) for position, entry in enumerate(line, 1)}


def _entries(session: Session, pool: str) -> list[Entry]:
    return _entries_by_pool(session, pool).get(pool, [])


def _entries_by_pool(session: Session, pool: str | None) -> dict[str, list[Entry]]:
    """Return the running and waiting attempts by pool; single columns, because rows with specs are slow to read."""
    query = select(
        Job.pool, Job.id, Job.attempt, Job.holder, Job.priority, Job.queued_at, Job.admitted_at, Job.state, Job.gang
    ).where(Job.state.in_(JOB_ACTIVE))
    if pool is not None:
        query = query.where(Job.pool == pool)
    found: dict[str, list[Entry]] = {}
    for of, job_id, attempt, holder, priority, queued_at, admitted_at, state, gang in session.execute(query):
        pending = state is JobState.PENDING and admitted_at is None
        if pending and queued_at is None and priority is not None:
            continue  # its submitter has not put it into the queue yet; an older version's submitter sends at once
        waits = pending and queued_at is not None
        entry = Entry(job_id, attempt, holder, priority or 0, queued_at or 0.0, waits, Gang.from_json(gang))
        found.setdefault(of, []).append(entry)
    return found


def _room(session: Session, pool: str) -> Room:
    query = select(Node.cpus, Node.gpus, Node.is_head, Node.endpoint).where(
        Node.pool == pool, Node.state == NodeState.READY
    )
    nodes = session.execute(query).all()
    # A node of a ray:// pool says how much memory it has; a local pool's drivers run on this host.
    of_head = [int((node.endpoint or {}).get("memory_bytes", 0)) for node in nodes if node.is_head]
    drivers = queue.drivers_in(max(of_head, default=0) or _memory_here())
    return Room(drivers, tuple(NodeSize(node.cpus, node.gpus) for node in nodes))


@lru_cache(maxsize=1)
def _memory_here() -> int:
    return memory.total_bytes()
