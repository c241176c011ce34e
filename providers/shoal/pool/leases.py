"""A claim on nodes in the hands of who made it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from shoal.errors import FencedError, StoreError
from shoal.pool import journal
from shoal.pool import reconcile as _reconcile
from shoal.state import Store

_RENEWALS_PER_TTL = 3
"""Two may be missed before the lease expires."""


class PoolLease:
    """A live lease. As a context manager it is renewed by a thread meanwhile, and released at the end.

    Attributes:
        id: Its id.
        epoch: Counts the times it was asked for; only the newest may renew it.
        pool: The pool.
        holder: Who has it.
    """

    def __init__(self, store: Store, lease_id: str, epoch: int, pool: str, holder: str, ttl: float) -> None:
        self.id = lease_id
        self.epoch = epoch
        self.pool = pool
        self.holder = holder
        self._store = store
        self._ttl = ttl
        self._released = threading.Event()

    def renew(self) -> None:
        """Hold on to it for another time to live.

        Raises:
            FencedError: It has expired, was released, or is somebody else's under a newer epoch.
        """
        with self._store.transaction() as session:
            journal.renew_lease(session, self.id, self.epoch, self._ttl, time.time())

    def release(self) -> None:
        """Give it up; its nodes go unless others need them. Released or expired already: nothing happens."""
        self._released.set()
        with self._store.transaction() as session:
            journal.release_leases(session, self.pool, self.holder, time.time())
        _reconcile.reconcile(self._store, self.pool)

    def __enter__(self) -> PoolLease:
        threading.Thread(target=self._keep, name=f"lease-{self.id}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._released.wait(self._ttl / _RENEWALS_PER_TTL):
            try:
                self.renew()
            except FencedError:
                return
            except StoreError:
                continue  # unreachable for a moment: the next renewal may still come in time
