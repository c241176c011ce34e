"""The detached process that reconciles while a pool on this host is up: ``python -m shoal.pool.reconciler``.

One per home and host, which a file lock sees to. Nobody depends on it for safety: every write and every sweep
reconciles too. It carries asynchronous operations to their end, holds MIN_NODES, replaces dead nodes, and ends
forgotten pools.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from sqlalchemy import select

from shoal.errors import PoolNotFoundError, StoreError
from shoal.pool import journal
from shoal.pool.backends.local import inherited_environment
from shoal.pool.holder import host
from shoal.pool.processes import spawn_detached
from shoal.pool.reconcile import reconcile
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import RECONCILE_PERIOD
from shoal.state import Store, home
from shoal.state.home import subfolder
from shoal.state.locks import open_locked
from shoal.state.schema import JOB_ENDED, Job, Pool, PoolState

log = logging.getLogger("shoal.reconciler")


def ensure_running() -> None:
    """Start the reconciler of this home unless it runs."""
    with open_locked(_lock_path(), wait=False) as free:
        if not free:
            return
    spawn_detached(
        [sys.executable, "-m", "shoal.pool.reconciler"],
        env=inherited_environment(),
        log=subfolder("logs") / "reconciler.log",
    )


def _lock_path() -> Path:
    return home() / "reconciler.lock"


def run() -> None:
    """Reconcile until there is nothing to look after."""
    if not Path(os.environ["SHOAL_HOME"]).exists():
        return  # removed while this process came up: to make it anew would leave a folder that nobody asked for
    store = Store(migrate=False)
    while True:
        with open_locked(_lock_path(), wait=False) as mine:
            if not mine:
                return
            while store.exists() and (names := _to_look_after(store)):
                for name in names:
                    _reconcile_one(store, name)
                time.sleep(RECONCILE_PERIOD)
        # A write between the last look and letting go of the lock saw it held and started nobody: look once more.
        if not store.exists() or not _to_look_after(store):
            return


def _reconcile_one(store: Store, name: str) -> None:
    try:
        _end_forgotten(store, name)
        changes = reconcile(store, name)
    except PoolNotFoundError:
        return
    except Exception:
        log.exception("pool %s: this round failed, the next one goes on", name)
        return
    if changes.started or changes.ended:
        log.info("pool %s: started %s, ended %s", name, list(changes.started), list(changes.ended))


def _to_look_after(store: Store) -> list[str]:
    try:
        with store.reading() as session:
            rows = session.scalars(select(Pool).where(Pool.host == host()))
            # One embedded in a process is looked after until that process ends: its row goes last.
            return [pool.name for pool in rows if pool.state is not PoolState.DOWN or pool.owner]
    except StoreError as error:
        log.warning("%s", error)
        return [] if not store.exists() else ["?"]  # unreachable for a moment is no reason to leave


def _end_forgotten(store: Store, name: str) -> None:
    """Take a pool down that nobody wanted anything of for its `idle_timeout`."""
    now = time.time()
    with store.transaction() as session:
        snapshot = journal.load(session, name)
        pool = snapshot.pool
        timeout = PoolSpec.model_validate(pool.spec).idle_timeout
        busy = any(node.busy for node in snapshot.nodes) or any(lease.expires_at > now for lease in snapshot.leases)
        busy = busy or bool(session.scalars(select(Job).where(Job.pool == name, Job.state.not_in(JOB_ENDED))).first())
        if busy:
            pool.touched_at = now
        elif pool.state is PoolState.UP and timeout is not None and now - pool.touched_at > timeout:
            log.info("pool %s: nobody wanted anything of it for %.0f s", name, timeout)
            journal.request_down(session, name, now)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")
    run()
