"""The client handle of a lease, which can renew and release the lease. The handle is also a context manager."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from shoal.background_threads import BackgroundThread
from shoal.errors import FencedError, StoreError
from shoal.pool.journal import commands
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.state import Store

log = logging.getLogger("shoal.pool")

_RENEWALS_PER_TTL = 3
"""Number of renewals within a lease's time to live. With 3, a lease stays valid even if two renewals in a row fail."""


class PoolLease:
    """Client handle of a lease, with methods to renew and release the lease.

    In a ``with`` block, a background thread renews the lease, and the lease is released at the end of the block.

    Attributes:
        id: Id of the lease.
        epoch: Number of times that the lease was requested. Only the object that the newest request returned may renew
            the lease.
        ttl: Seconds after which a lease that is not renewed expires.
        lost: Reason why the lease expired or was taken over before it was released; None otherwise. If there is a
            reason, the leased nodes may be gone.
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
        """Renew the lease: set its expiry to now plus the lease's time to live.

        Raises:
            FencedError: The lease has expired, was released, or was requested again, so that this object's `epoch` is
                no longer the newest.
        """
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.renew(session, self.id, self.epoch, self._clock())

    def leave_to_job(self) -> None:
        """Stop renewing the lease of a submitted job, and let the lease end together with the job.

        If the same job was submitted again in the meantime, this method does nothing. The newest submission calls the
        method, too.
        """
        try:
            with transaction(self._store, JournalStep.REQUEST) as session:
                commands.let_expire(session, self.id, self.epoch, self._clock())
        except StoreError as error:
            log.warning("the lease stays for up to %.0f s after the end of its job: %s", self.ttl, error)

    def release(self) -> None:
        """Release the lease. The lease's nodes are ended, unless another lease or the base demand (the size that `up`
        or `scale` has set) needs them.

        If the lease was already released or has expired, this method does nothing.
        """
        self._released.set()
        self._release()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease in a background thread inside the ``with`` block. The lease is not released at the end."""
        ended = threading.Event()
        self._renew_until(ended)
        try:
            yield
        finally:
            ended.set()

    def __enter__(self) -> PoolLease:
        self._renew_until(self._released)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew_until(self, ended: threading.Event) -> None:
        BackgroundThread(lambda: self._keep(ended), name=f"lease-{self.id}", stop=ended.set).start()

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(self.ttl / _RENEWALS_PER_TTL):
            try:
                self.renew()
            except FencedError as error:
                if not ended.is_set():
                    self.lost = str(error)
                    log.warning("%s", error)
                return
            except StoreError as error:
                log.warning("the lease could not be renewed; the next renewal may still be in time: %s", error)
