"""Waiting for a pool, and reconciling it meanwhile: who waits does not depend on the reconciler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.errors import ScaleError, StoreUnreachableError
from shoal.pool.journal import rows
from shoal.pool.reconcile import Clock, reconcile
from shoal.pool.status import PoolStatus, status_of
from shoal.pool.tunables import DOWN_PATIENCE, STORE_PERIOD, WAIT_PERIOD, WAIT_PERIOD_MOST
from shoal.pool.turns import Turn
from shoal.state import Store
from shoal.state.schema import Operation, OperationKind, OperationState, PoolState

log = logging.getLogger("shoal.pool")

OnProgress = Callable[[PoolStatus], None]
"""Called now and then while something is waited for."""


class Waiting:
    """Waits for one pool.

    Args:
        store: The state store.
        name: The pool.
        clock: Seconds since the epoch.
    """

    def __init__(self, store: Store, name: str, clock: Clock) -> None:
        self._store = store
        self._name = name
        self._clock = clock
        self._turn = Turn(name)

    def for_operation(
        self,
        operation_id: str,
        patience: float,
        *,
        block_until_min_cluster_size: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        """Wait until an operation has ended.

        Args:
            operation_id: The operation.
            patience: Seconds until its deadline: for so long a store that is away is waited for.
            block_until_min_cluster_size: Nodes that are enough to return; it goes on.
            on_progress: Called now and then.

        Raises:
            ScaleError: It was rolled back, which is seen to the end, or another took its place.
            StoreUnreachableError: The store was still away when `patience` was over.
        """
        operation = self._ended(
            operation_id, patience, block_until_min_cluster_size=block_until_min_cluster_size, on_progress=on_progress
        )
        if operation is None:
            return
        if operation.state is OperationState.SUCCEEDED:
            return
        if operation.state is OperationState.ROLLED_BACK:
            self.until_settled()
        back = "" if operation.state is OperationState.SUPERSEDED else _rolled_back_to(operation)
        raise ScaleError(
            f'pool "{self._name}" did not reach {operation.size} nodes: {operation.error}{back}', operation.node_errors
        )

    def _ended(
        self,
        operation_id: str,
        patience: float,
        *,
        block_until_min_cluster_size: int | None,
        on_progress: OnProgress | None,
    ) -> Operation | None:
        """Wait for an operation's end; None where enough nodes are there before."""
        began = time.monotonic()
        with self._turns():
            while True:
                try:
                    self._reconcile()
                    operation = self._operation(operation_id)
                    if operation.state is not OperationState.OPEN:
                        return operation
                    status = self._status() if block_until_min_cluster_size is not None or on_progress else None
                except StoreUnreachableError as error:  # the nodes go on meanwhile, and so does this when it is back
                    if time.monotonic() - began >= patience:
                        raise
                    log.warning("waiting for the store: %s", error)
                    time.sleep(STORE_PERIOD)
                    continue
                if (
                    status
                    and block_until_min_cluster_size is not None
                    and len(status.active) >= block_until_min_cluster_size
                ):
                    return None
                if status and on_progress:
                    on_progress(status)
                _pause(began)

    def until_down(self, on_progress: OnProgress | None = None) -> None:
        """Where the pool is going down, wait until it is.

        Raises:
            ScaleError: Some node could not be ended; the message says which processes are left.
        """
        began = time.monotonic()
        with self._turns():
            while (status := self._status()).state == PoolState.STOPPING.value:
                self._reconcile()
                if on_progress:
                    on_progress(status)
                if time.monotonic() - began > DOWN_PATIENCE:
                    raise ScaleError(
                        f'pool "{self._name}" is not down after {DOWN_PATIENCE:.0f} s; `shoal sweep` tries again',
                        {node.name: node.error or node.state for node in status.leaving},
                    )
                _pause(began)

    def until_settled(self) -> None:
        """After a rollback: see the nodes gone that it started, so that nothing is left when the caller goes on."""
        began = time.monotonic()
        with self._turns():
            while time.monotonic() - began < DOWN_PATIENCE:
                self._reconcile()
                status = self._status()
                stopping = status.state == PoolState.STOPPING.value
                left = status.failed or status.leaving or len(status.active) + len(status.pending) > status.target
                if not left and not stopping:
                    return
                _pause(began)

    @contextmanager
    def _turns(self) -> Iterator[None]:
        """Reconcile meanwhile whenever no other waiter does."""
        try:
            yield
        finally:
            self._turn.give_up()

    def _reconcile(self) -> None:
        if self._turn.take():
            reconcile(self._store, self._name, clock=self._clock)

    def _status(self) -> PoolStatus:
        with self._store.reading() as session:
            return status_of(rows.load(session, self._name, lock=False), self._clock())

    def _operation(self, operation_id: str) -> Operation:
        with self._store.reading() as session:
            return session.get_one(Operation, operation_id)


def _pause(began: float) -> None:
    """Sleep for a tenth of the time waited so far, within limits: a long wait may end a little later."""
    time.sleep(min(max(WAIT_PERIOD, (time.monotonic() - began) / 10), WAIT_PERIOD_MOST))


def _rolled_back_to(operation: Operation) -> str:
    if operation.kind is OperationKind.LEASE and operation.replaced_size is None:
        return "; its lease was taken back"
    if operation.replaced_size is None:
        return "; everything it had started was ended"
    return f"; rolled back to {operation.replaced_size}"
