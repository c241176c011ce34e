"""The background process that starts and ends the nodes of this host's pools while any pool is up: the reconciler
(``python -m shoal.reconciler``).

The reconciler completes asynchronous operations, keeps MIN_NODES nodes running, replaces dead nodes, expires leases,
and takes idle pools down. A file lock ensures that only one reconciler runs per host, ``SHOAL_HOME`` and store. If the
reconciler dies, the next request, the next sweep or any node's supervisor starts a new one. No request is lost in the
meantime, because requests are rows in the database, and every blocking call and every sweep reconciles the pool itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import func, select

from shoal import telemetry
from shoal.errors import PoolNotFoundError, StoreError
from shoal.os_processes import python_command
from shoal.own_pauses import waited_since
from shoal.pool import bound_host
from shoal.pool.backends.local.backend import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
from shoal.pool.bound_host import is_here
from shoal.pool.journal.rows import RETENTION_PERIOD, retain
from shoal.pool.reconciling import reconcile
from shoal.pool.timeouts import RECONCILE_PERIOD, STORE_PATIENCE
from shoal.state import Store
from shoal.state.home import lock_file, open_locked, subfolder
from shoal.state.schema import Node, Pool, PoolState

log = logging.getLogger("shoal.reconciler")

COMMAND = python_command("-m", "shoal.reconciler")

Watch = Callable[[Store, list[str]], None]
"""Function that is called in every round with the names of the pools, such as the check for lost jobs: `shoal.pool`
must not import `shoal.jobs`."""

_MOST_AT_ONCE = 32
"""Largest number of pools that are reconciled at the same time. Each pool has its own thread, so that a cluster that
does not answer does not delay the other pools."""


def lock_path() -> Path:
    """Return the path of the file that this process keeps locked while it reconciles pools."""
    bound_host.adopt()  # before the lock of this version exists
    return lock_file(bound_host.RECONCILER)


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
        if not store.exists() or _active_pools(store) == []:
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
    with ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="pool") as executor:
        while store.exists() and (names := _active_pools(store)) != []:
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
                rounds[name] = executor.submit(_reconcile_one, store, name, tidy=tidy)
            watch(store, names or [])
            time.sleep(RECONCILE_PERIOD)


def log_path() -> Path:
    """Return the log file of this process."""
    return subfolder("logs") / "reconciler.log"


def _reconcile_one(store: Store, name: str, *, tidy: bool) -> None:
    try:
        changes = reconcile(store, name)
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


def _active_pools(store: Store) -> list[str] | None:
    """Return the names of this host's pools that need a reconciler, or None if the store does not answer."""
    try:
        with store.reading() as session:
            rows = session.scalars(select(Pool).order_by(Pool.name))
            # A pool that belongs to a process (`owner`) stays in the list even while the pool is down, because the
            # reconciler has to remove the pool's row when the process ends.
            return [pool.name for pool in rows if is_here(pool) and (pool.state is not PoolState.DOWN or pool.owner)]
    except StoreError as error:
        log.warning("%s", error)
        return None if store.exists() else []


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
