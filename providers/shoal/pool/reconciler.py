"""The detached process that reconciles while a pool on this host is up: ``python -m shoal.pool.reconciler``.

One per host, home and store, which a file lock sees to; where it died, the next write, the next sweep or any node's
supervisor starts another. Nobody depends on it for safety: every write and every sweep reconciles too. It carries
asynchronous operations to their end, holds MIN_NODES, replaces dead nodes, expires leases, and ends forgotten pools.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import select

from shoal.errors import PoolNotFoundError, StoreError
from shoal.pool.backends.local.backend import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
from shoal.pool.holder import is_here
from shoal.pool.journal import rows
from shoal.pool.journal.retention import retain
from shoal.pool.reconcile import reconcile
from shoal.pool.silent_jobs import SilentJobs
from shoal.pool.tunables import RECONCILE_PERIOD, RETENTION_PERIOD
from shoal.state import Store
from shoal.state.home import home, lock_file, store_tag, subfolder
from shoal.state.host import hostname
from shoal.state.locks import open_locked
from shoal.state.schema import Pool, PoolState

log = logging.getLogger("shoal.reconciler")

_SETTLE = [sys.executable, "-m", "shoal.jobs.settle"]
"""A process of its own, because jobs are above pools and asking a head may take 30 s."""

_SILENCE_PERIOD_S = 10.0
"""Between looks for jobs that give no sign of life."""

_SETTLE_PERIOD_S = 60.0
"""Between two processes that settle jobs: one may ask a head that needs a while to answer again."""

_MOST_AT_ONCE = 32
"""Pools that are looked after side by side: one whose cluster does not answer, for seconds, holds up none of these."""


def ensure_running() -> None:
    """Start the reconciler of this home unless it runs."""
    with open_locked(_lock_path(), wait=False) as free:
        if not free:
            return
    spawn_detached(
        [sys.executable, "-m", "shoal.pool.reconciler"],
        env=inherited_environment(),
        log=_log(),
    )


def _lock_path() -> Path:
    return lock_file("reconciler")


def _lock_path_of_0_1() -> Path:
    """Where supervisors of shoal 0.1 look whether a reconciler runs: without it each would spawn one every 5 s."""
    return home() / f"reconciler-{hostname()}{store_tag()}.lock"


def run() -> None:
    """Reconcile until there is nothing to look after."""
    if not Path(os.environ["SHOAL_HOME"]).exists():
        return  # removed while this process came up: to make it anew would leave a folder that nobody asked for
    store = Store(migrate=False)
    while True:
        with ExitStack() as old, open_locked(_lock_path(), wait=False) as mine:
            if not mine:
                return
            old.enter_context(open_locked(_lock_path_of_0_1(), wait=False))
            _look_after_all(store)
        # A write between the last look and letting go of the lock saw it held and started nobody: look once more.
        if not store.exists() or not _to_look_after(store):
            return


def _look_after_all(store: Store) -> None:
    """Rounds for every pool, until there is none to look after."""
    rounds: dict[str, Future[None]] = {}
    retained_at: dict[str, float] = {}
    settling = _Settling(store)
    with ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="pool") as executor:
        while store.exists() and (names := _to_look_after(store)):
            for name in names:
                if name in rounds and not rounds[name].done():
                    continue
                now = time.monotonic()
                tidy = now - retained_at.setdefault(name, now) > RETENTION_PERIOD
                if tidy:
                    retained_at[name] = now
                rounds[name] = executor.submit(_reconcile_one, store, name, tidy=tidy)
            settling.look(names)
            time.sleep(RECONCILE_PERIOD)


class _Settling:
    """Has lost jobs settled.

    Args:
        store: The state store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._silent = SilentJobs()
        self._look_at = self._settle_at = 0.0

    def look(self, names: list[str]) -> None:
        """Where a job of these pools gives no sign of life, have its head asked."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _SILENCE_PERIOD_S
        try:
            with self._store.reading() as session:
                silent = self._silent.among(rows.unfinished_jobs(session, names))
            if silent and now >= self._settle_at:
                self._settle_at = now + _SETTLE_PERIOD_S
                log.info("no sign of life of jobs %s: asking their heads", ", ".join(job.id for job in silent))
                spawn_detached(_SETTLE, env=inherited_environment(), log=_log())
        except StoreError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("lost jobs could not be looked for, the next look goes on")


def _log() -> Path:
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
        log.exception("pool %s: this round failed, the next one goes on", name)
        return
    for sentence in changes.sentences():
        log.info("pool %s: %s", name, sentence)


def _to_look_after(store: Store) -> list[str]:
    try:
        with store.reading() as session:
            rows = session.scalars(select(Pool).order_by(Pool.name))
            # One embedded in a process is looked after until that process ends: its row goes last.
            return [pool.name for pool in rows if is_here(pool) and (pool.state is not PoolState.DOWN or pool.owner)]
    except StoreError as error:
        log.warning("%s", error)
        return [] if not store.exists() else ["?"]  # unreachable for a moment is no reason to leave


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")
    run()
