"""A claim on nodes in the hands of who made it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from shoal.errors import FencedError, StoreError
from shoal.pool.journal import commands
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.state import Store

log = logging.getLogger(__name__)

_RENEWALS_PER_TTL = 3
"""Two may be missed before the lease expires."""


class PoolLease:
    """A live lease. As a context manager it is renewed by a thread meanwhile, and released at the end.

    Attributes:
        id: Its id.
        epoch: Counts the times it was asked for; only the newest may renew it.
        ttl: Seconds that it lives without being renewed.
        lost: Why it is not this holder's any more, though it was not released: what it held may be gone.
    """

    def __init__(
        self,
        store: Store,
        lease_id: str,
        epoch: int,
        ttl: float,
        release: Callable[[], object],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = lease_id
        self.epoch = epoch
        self.ttl = ttl
        self.lost: str | None = None
        self._store = store
        self._release = release
        self._clock = clock
        self._released = threading.Event()

    def renew(self) -> None:
        """Hold on to it for another time to live.

        Raises:
            FencedError: It has expired, was released, or is somebody else's under a newer epoch.
        """
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.renew(session, self.id, self.epoch, self._clock())

    def release(self) -> None:
        """Give it up; its nodes go unless others need them. Released or expired already: nothing happens."""
        self._released.set()
        self._release()

    def __enter__(self) -> PoolLease:
        threading.Thread(target=self._keep, name=f"lease-{self.id}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._released.wait(self.ttl / _RENEWALS_PER_TTL):
            try:
                self.renew()
            except FencedError as error:
                if not self._released.is_set():
                    self.lost = str(error)
                    log.warning("%s", error)
                return
            except StoreError as error:
                log.warning("a lease could not be renewed; the next renewal may still come in time: %s", error)
