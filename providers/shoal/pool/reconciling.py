"""Reconcile a pool: start its missing nodes and end its surplus nodes. Reconciling is safe at any time, repeatedly and
concurrently.

Reconciling has four steps:

1. Read the rows and check the processes, without a lock. Stop here if nothing has to change.
2. In one transaction, write the observed state of the nodes, and which nodes to start and end (the intents).
3. Start and end these nodes.
4. In another transaction, delete the rows of the nodes that have ended, and record which nodes could not be ended.

If the process is killed between two steps, the next run continues from the rows in the database.

A sweep of this host also ends the nodes that have no row in the database.

While any pool is up, the reconciler (``python -m shoal.reconciler``) reconciles this host's pools again and again: it
completes asynchronous operations, keeps MIN_NODES nodes running, replaces dead nodes, expires leases, and takes idle
pools down. A file lock ensures that only one reconciler runs per host, ``SHOAL_HOME`` and store. If the reconciler
dies, the next request, the next sweep or any node's supervisor starts a new one. No request is lost in the meantime,
because requests are rows in the database, and every blocking call and every sweep reconciles the pool itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from shoal import telemetry
from shoal.errors import PoolNotFoundError, StoreError
from shoal.os_processes import ProcessId, python_command
from shoal.own_pauses import waited_since
from shoal.pool.backends import all_backends, backend_of
from shoal.pool.backends.interface import Backend, NodeRef, PoolRef, Seen
from shoal.pool.backends.local.backend import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
from shoal.pool.bound_host import is_here, unrecorded
from shoal.pool.holder import Notice, job_of
from shoal.pool.journal import commands, rows, sizes, usage
from shoal.pool.journal.advance import advance, is_due, record_seen
from shoal.pool.journal.rows import RETENTION_PERIOD, JournalStep, act, retain, transaction
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RECONCILE_PERIOD, STORE_PATIENCE
from shoal.state import Store, stamps
from shoal.state.changes import UNCHANGED_PERIOD, StoreChanges, file_sign
from shoal.state.home import file_name, lock_file, open_locked, subfolder
from shoal.state.schema import Node, NodeState, Pool, PoolState

sweep_log = logging.getLogger("shoal.pool")

Clock = Callable[[], float]
"""Function that returns seconds since the epoch."""


@dataclass(frozen=True)
class Changes:
    """The changes that one call of `reconcile` has made to a pool.

    Attributes:
        started: Names of the started nodes.
        ended: Names of the ended nodes.
        decided: One sentence for each operation or lease that ended.
        left: Reasons why nodes could not be ended yet, or why the size is not confirmed yet.
    """

    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return the changes as sentences for the log, one sentence for each change."""
        return [*self.decided, *(f"started {name}" for name in self.started), *(f"ended {name}" for name in self.ended)]


@dataclass(frozen=True)
class Reading:
    """The rows of a pool, as they were read without a lock.

    Attributes:
        snapshot: The rows.
        ahead_s: Seconds by which the clock that all hosts share is ahead of this host's.
        spent: Whether the lifetime or budget of a lease is used up.
    """

    snapshot: Snapshot
    ahead_s: float
    spent: bool

    @classmethod
    def of(cls, store: Store, name: str, clock: Clock = time.time) -> Reading:
        """Read the rows of a pool."""
        with store.reading() as session:
            snapshot = rows.load(session, name, lock=False)
            now = clock()
            ahead_s = stamps.shared_now(session, now) - now
            return cls(snapshot, ahead_s, bool(usage.spent_leases(session, snapshot, now)))

    @classmethod
    def of_all(cls, store: Store, names: Collection[str]) -> dict[str, Reading]:
        """Read the rows of several pools, with as many queries as for one."""
        with store.reading() as session:
            now = time.time()
            ahead_s = stamps.shared_now(session, now) - now
            return {
                each.pool.name: cls(each, ahead_s, bool(usage.spent_leases(session, each, now)))
                for each in rows.load_all(session, names)
            }

    @property
    def ages(self) -> bool:
        """Return whether the reading may become wrong although no row changes: a lease's time or budget is used up, or
        the driver of a job with a lease ends."""
        leases = self.snapshot.leases
        return any(each.max_lifetime or each.budget_node_hours or job_of(each.holder) for each in leases)


def reconcile(store: Store, name: str, *, clock: Clock = time.time, reading: Reading | None = None) -> Changes:
    """Start the missing nodes and end the surplus nodes of one pool. Return without waiting until the started nodes are
    ready.

    Args:
        store: The store with the pool's rows.
        name: Name of the pool.
        clock: Function that returns the present time.
        reading: The rows, if they have been read and have not changed since.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    reading = reading or Reading.of(store, name, clock)
    snapshot = reading.snapshot
    if not is_here(snapshot.pool):
        return Changes()
    spec = PoolSpec.model_validate(snapshot.pool.spec)
    backend = backend_of(spec)
    for node in snapshot.nodes:  # both become names of files and folders
        file_name(node.id)
        file_name(node.name)
    refs = [NodeRef.of(node) for node in snapshot.nodes if node.state is not NodeState.ENDING]
    seen = Seen()
    if snapshot.pool.state is PoolState.UP:
        backend.renew(PoolRef.of(snapshot.pool, len(refs), clock()))
        seen = backend.look(spec, refs)
    abandoned = is_abandoned(snapshot)
    now = clock()
    if not abandoned and not reading.spent and not is_due(snapshot, refs, seen, now, shared_now=now + reading.ahead_s):
        return Changes()
    with transaction(store, JournalStep.INTEND) as session:
        now = clock()
        # Check again inside the transaction, because a process may have submitted the pool's job again in the meantime.
        if abandoned and is_abandoned(rows.load(session, name)):
            commands.down(session, name, now)
        snapshot = rows.load(session, name)
        rows.adopt(snapshot.pool)
        record_seen(snapshot, refs, seen)
        intents = advance(session, snapshot, now)
        sizes.note(session, name, now, has_looked=seen.silence is None)
        ref = PoolRef.of(snapshot.pool, intents.size, now, intents.held)
    if intents.start:
        with act(JournalStep.START):
            backend.start(ref, intents.start)
    left = {}
    if intents.end or intents.is_unconfirmed:
        left = _end(store, backend, ref, intents.end)
    if snapshot.pool.state is PoolState.DOWN:
        _clean_up(store, backend, name, clock())
    return Changes(
        tuple(node.name for node in intents.start),
        tuple(node.name for node in intents.end if node.id not in left),
        tuple(intents.decided),
        tuple(dict.fromkeys(left.values())),
    )


def _end(store: Store, backend: Backend, pool: PoolRef, nodes: list[NodeRef]) -> dict[str, str]:
    """End nodes, record the result, and return what is left, by the id of the node or the pool."""
    with act(JournalStep.END):
        outcome = backend.end(pool, nodes)
    left = {key: problem for key, problem in outcome.items() if problem}
    with transaction(store, JournalStep.CONFIRM) as session:
        rows.forget(session, [node_id for node_id, problem in outcome.items() if problem is None])
        rows.note_stuck(session, left)
        rows.confirm(session, pool.spec.name, pool.decision, left.get(pool.id))
    return left


def _clean_up(store: Store, backend: Backend, name: str, now: float) -> None:
    """Remove the token of a pool that is down.

    If the pool belonged to a process (an embedded pool) and this process has ended, remove the pool's folder and row,
    and record the end of its jobs, so that they can be submitted again at once.
    """
    with transaction(store, JournalStep.TIDY) as session:
        pool = rows.load(session, name).pool
        if pool.state is not PoolState.DOWN:
            return
        forgotten = owner_has_ended(pool)
        backend.discard(name, everything=forgotten)
        if forgotten:
            why = "the process that started the job, and to which its pool belonged, has ended: submit the job again"
            usage.end_jobs_of_pool(session, name, why, now)
            session.delete(pool)


def is_abandoned(snapshot: Snapshot) -> bool:
    """Return whether a pool is up although nobody needs it any more: it is an embedded pool, the process that it
    belongs to has ended, and no job has a lease on it."""
    has_job = any(job_of(lease.holder) is not None for lease in snapshot.leases)
    return snapshot.pool.state is PoolState.UP and not has_job and owner_has_ended(snapshot.pool)


def owner_has_ended(pool: Pool) -> bool:
    """Return whether a pool is an embedded pool, and the process that it belongs to has ended."""
    return pool.owner is not None and ProcessId.from_json(pool.owner).known_dead()


_PASSES = 5
"""Largest number of times that one sweep reconciles each pool. Once may not be enough, because the workers are ended
only after their head has ended. More than five times were never needed."""


def sweep(store: Store, *, clock: Clock = time.time) -> list[str]:
    """End the nodes on this host that no pool needs any more, and the nodes that have no row in the database.

    The sweep is safe at any time, repeatedly and concurrently. After an error in one pool, it goes on with the next.
    """
    did: list[str] = []
    with store.reading() as session:
        names = rows.pool_names(session, embedded=True)
    for name in names:
        try:
            did.extend(
                Notice(f"{name}: {each}", Notice.of(each).holder, name) for each in _sweep_one(store, name, clock)
            )
        except Exception as error:
            sweep_log.exception("pool %s could not be swept", name)
            did.append(Notice(f"{name}: could not be swept: {type(error).__name__}: {error}", pool=name))
    for backend, node_id in left_over(store):
        with act(JournalStep.CLEAR):
            problem = backend.clear(node_id)
        did.append(f"left-over node {node_id}: {problem or 'ended'}")
    return did


def left_over(store: Store) -> list[tuple[Backend, str]]:
    """Return the nodes that have processes or files on this host, but no row in the store."""
    # The nodes' folders are listed before the rows are read. A node's row is written before its folder is created. So a
    # listed folder without a row does not belong to a node that is about to start, and can be removed.
    found = [(backend, node_id) for backend in all_backends() for node_id in backend.existing()]
    known = set(store.scalars(select(Node.id)))
    return [(backend, node_id) for backend, node_id in found if node_id not in known]


def _sweep_one(store: Store, name: str, clock: Clock) -> Iterator[str]:
    pool = store.get(Pool, name)
    if pool is not None and pool.state is not PoolState.DOWN and (why := unrecorded(pool)):
        yield why
        return
    changes = Changes()
    for _ in range(_PASSES):
        try:
            changes = reconcile(store, name, clock=clock)
        except PoolNotFoundError:
            # The pool belonged to a process that has ended, so its row was removed, and nothing is left to sweep.
            return
        yield from changes.sentences()
        if changes == Changes():
            with suppress(PoolNotFoundError):
                retain(store, name, clock())
            return
    yield from changes.left


log = logging.getLogger("shoal.reconciler")

COMMAND = python_command("-m", "shoal.reconciler")

Watch = Callable[[Store, list[str], object], None]
"""Function that is called in every round with the names of the pools and the sign of :class:`StoreChanges`, such as the
check for lost jobs: `shoal.pool` must not import `shoal.jobs`."""

_MOST_AT_ONCE = 32
"""Largest number of pools that are reconciled at the same time. Each pool has its own thread, so that a cluster that
does not answer does not delay the other pools."""


def lock_path() -> Path:
    """Return the path of the file that this process keeps locked while it reconciles pools."""
    return lock_file("reconciler")


def changes_seen(lock: Path) -> object:
    """Return a value that is equal to an earlier one only if the reconciler of this host has seen no change of the
    store between the two calls.

    Args:
        lock: Path of the reconciler's lock file; see :func:`lock_path`.
    """
    with open_locked(lock, wait=False) as free:
        return (None if free else file_sign(lock)) or object()


def ensure_running() -> None:
    """Start the reconciler of this ``SHOAL_HOME`` and store, unless it is already running."""
    with open_locked(lock_path(), wait=False) as free:
        if not free:
            return
    spawn_detached(COMMAND, env=inherited_environment(), log=log_path())


def run(watch: Watch) -> None:
    """Reconcile this host's pools (start their missing nodes and end their surplus nodes) until no pool needs a
    reconciler."""
    if not Path(os.environ["SHOAL_HOME"]).exists():
        # The folder $SHOAL_HOME was removed while this process started. The process ends here, because opening the
        # store would create the folder again.
        return
    store = Store(migrate=False)
    while True:
        lock = lock_path()
        with open_locked(lock, wait=False) as mine:
            if not mine:
                return
            try:
                _reconcile_all(store, lock, watch)
            except _Ended as ended:
                log.warning("%s: this reconciler ends; the next request or any node starts another one", ended)
                return
        # Another process may have started a pool after `_reconcile_all` returned, but before this process released the
        # lock. That process started no reconciler, because the lock was still held. So look for active pools again
        # before this process ends.
        if not store.exists() or _active(_all_pools(store)) == []:
            return


class _Ended(Exception):
    """Signal that this reconciler has to end, although pools may still need a reconciler. The message is the reason."""


def _reconcile_all(store: Store, lock: Path, watch: Watch) -> None:
    """Reconcile every pool of this host (start its missing nodes and end its surplus nodes) again and again, until no
    pool needs a reconciler.
    """
    telemetry.follow_nodes(lambda: _node_counts(store))
    rounds: dict[str, Future[None]] = {}
    retained_at: dict[str, float] = {}
    locked = lock.stat()
    answered_at = time.monotonic()
    kept = KeptReadings(store)
    with ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="pool") as executor:
        while store.exists() and (names := kept.active_pools(lock)) != []:
            if not _is_file(lock, locked):
                # The lock file was removed, usually because a user has removed $SHOAL_HOME. The lock on a removed
                # file does not stop other reconcilers from starting, so this reconciler ends.
                raise _Ended(f"the lock file {lock} was removed")
            if names is not None:
                answered_at = time.monotonic()
            elif waited_since(answered_at) > STORE_PATIENCE:
                raise _Ended(f"the store could not be reached for {STORE_PATIENCE:.0f} s")
            for name in names or ():
                if name in rounds and not rounds[name].done():
                    continue
                now = time.monotonic()
                tidy = now - retained_at.setdefault(name, now) > RETENTION_PERIOD
                if tidy:
                    retained_at[name] = now
                rounds[name] = executor.submit(_reconcile_one, store, name, kept, tidy=tidy)
            watch(store, names or [], kept.sign)
            time.sleep(RECONCILE_PERIOD)


_READ_SINGLY = 4
"""Largest number of pools whose rows are read one by one after a change of the store."""


class KeptReadings:
    """The rows that a reconciler has read, until the store changes.

    Args:
        store: The store.

    Attributes:
        sign: Sign of the store's changes at the beginning of the round; see :meth:`StoreChanges.sign`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes = StoreChanges(store)
        self.sign: object = None
        self._pools: list[Pool] | None = None
        self._readings: dict[str, Reading] = {}
        self._read_at = 0.0

    def active_pools(self, lock: Path) -> list[str] | None:
        """Begin a round. Return the names of this host's pools that need a reconciler, or None if the store does not
        answer.

        Args:
            lock: The file that this reconciler keeps locked. Its time is that of the last change that this reconciler
                has seen, so the supervisors of this host need not read their rows before.
        """
        sign, now = self._changes.sign(), time.monotonic()
        if sign != self.sign or now > self._read_at + UNCHANGED_PERIOD:
            self.sign, self._read_at, self._pools, self._readings = sign, now, None, {}
            with suppress(FileNotFoundError):
                os.utime(lock)
        if self._pools is None:
            self._pools = _all_pools(self._store)
            names = _active(self._pools)
            if names is not None and len(names) > _READ_SINGLY:
                with suppress(StoreError):  # the threads of the pools tell it
                    self._readings = Reading.of_all(self._store, names)
            return names
        return _active(self._pools)

    def of(self, name: str) -> Reading:
        """Return the rows of a pool; they are read again if they have not been kept, or are no longer right."""
        kept = self._readings
        if name not in kept or kept[name].ages:
            kept[name] = Reading.of(self._store, name)
        return kept[name]


def log_path() -> Path:
    """Return the log file of this process."""
    return subfolder("logs") / "reconciler.log"


def _reconcile_one(store: Store, name: str, kept: KeptReadings, *, tidy: bool) -> None:
    try:
        changes = reconcile(store, name, reading=kept.of(name))
        if tidy:
            retain(store, name, time.time())
    except PoolNotFoundError:
        return
    except StoreError as error:
        log.warning("pool %s: %s", name, error)
        return
    except Exception:
        log.exception("pool %s: this reconcile round failed; the next round tries again", name)
        return
    for sentence in changes.sentences():
        log.info("pool %s: %s", name, sentence)


def _all_pools(store: Store) -> list[Pool] | None:
    """Return the rows of all pools, or None if the store does not answer."""
    try:
        return list(store.scalars(select(Pool).order_by(Pool.name)))
    except StoreError as error:
        log.warning("%s", error)
        return None if store.exists() else []


def _active(pools: list[Pool] | None) -> list[str] | None:
    """Return the names of this host's pools that need a reconciler, or None if the store does not answer."""
    # A pool that belongs to a process (`owner`) stays in the list even while the pool is down, because the reconciler
    # has to remove the pool's row when the process ends.
    if pools is None:
        return None
    return [pool.name for pool in pools if is_here(pool) and (pool.state is not PoolState.DOWN or pool.owner)]


def _node_counts(store: Store) -> dict[tuple[str, str], int]:
    """Return the number of nodes of this host's pools, by pool and state."""
    query = select(Node.pool, Node.state, func.count()).group_by(Node.pool, Node.state)
    with store.reading() as session:
        here = {pool.name for pool in session.scalars(select(Pool)) if is_here(pool)}
        return {(pool, state.value): count for pool, state, count in session.execute(query) if pool in here}


def _is_file(path: Path, file: os.stat_result) -> bool:
    """Return whether the file at a path is still the given file, and was not removed or replaced."""
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False
