"""Wait for a pool. The waiting process itself reconciles the pool (starts and ends its nodes), so it does not depend on
the background reconciler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

from shoal import telemetry
from shoal.errors import PoolNotFoundError, ScaleError, StoreUnreachableError
from shoal.own_pauses import waited_since
from shoal.pool.journal import rows
from shoal.pool.lease_queue import nodes_for
from shoal.pool.reconcile.rounds import Clock, is_abandoned, owner_has_ended, reconcile
from shoal.pool.selection import is_embedded
from shoal.pool.status import PoolStatus, status_of
from shoal.pool.timeouts import DOWN_PATIENCE, STORE_PERIOD, TURN_PATIENCE, WAIT_PERIOD, WAIT_PERIOD_MOST
from shoal.state import Store
from shoal.state.home import lock_file
from shoal.state.schema import Operation, OperationKind, OperationState, PoolState

log = logging.getLogger("shoal.pool")

OnProgress = Callable[[PoolStatus], None]
"""Function that a blocking call calls repeatedly with the pool's status while it waits."""


class Waiting:
    """Methods that wait until an operation of a pool has ended, until the pool is down, or until a rollback has
    completed.

    Args:
        store: The state store.
        name: Name of the pool.
        clock: Function that returns seconds since the epoch.
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
        on_progress: OnProgress | None,
    ) -> None:
        """Wait until an operation (a request to change the pool's size) has succeeded, or was rolled back or replaced.

        Raises:
            ScaleError: The operation was rolled back and the rollback has completed, or a newer operation replaced it.
            StoreUnreachableError: The store was still unreachable after `patience` seconds.
        """
        began = time.monotonic()
        operation = self._wait_for_end(operation_id, patience, on_progress)
        state = OperationState.SUCCEEDED if operation is None else operation.state
        telemetry.nodes_awaited(self._name, state.value, time.monotonic() - began)
        if operation is None or operation.state is OperationState.SUCCEEDED:
            return
        if operation.state is OperationState.ROLLED_BACK:
            self.until_settled()
        back = "" if operation.state is OperationState.SUPERSEDED else _rolled_back_to(operation)
        raise ScaleError(
            f'pool "{self._name}" did not reach {operation.size} nodes: {operation.error}{back}', operation.node_errors
        )

    def _wait_for_end(self, operation_id: str, patience: float, on_progress: OnProgress | None) -> Operation | None:
        """Wait until an operation ends, and return the operation. Return None as soon as the operation's
        `block_until_min_cluster_size` nodes are ready, if this happens earlier."""
        began = time.monotonic()
        with self._giving_up_turn():
            while True:
                try:
                    self._reconcile()
                    with self._store.reading(snapshot=False) as session:
                        operation = session.get_one(Operation, operation_id)
                    if operation.state is not OperationState.OPEN:
                        return operation
                    least = operation.block_until_min_cluster_size
                    status, ready = self._progress(operation) if least is not None or on_progress else (None, 0)
                # Keep waiting, because the nodes continue to start while the store is unreachable.
                except StoreUnreachableError as error:
                    if time.monotonic() - began >= patience:
                        raise
                    log.warning("waiting for the store: %s", error)
                    time.sleep(STORE_PERIOD)
                    continue
                if least is not None and ready >= least:
                    return None
                if status and on_progress:
                    on_progress(status)
                pause(began)

    def until_down(self, on_progress: OnProgress | None = None) -> None:
        """Wait until all nodes of a pool that is going down have ended. Return at once if the pool is up or already
        down.

        Raises:
            ScaleError: A node could not be ended. The message names the remaining processes.
        """
        began = time.monotonic()
        # PoolNotFoundError is expected here, because the row of an embedded pool is removed when the pool is down.
        with self._giving_up_turn(), suppress(PoolNotFoundError):
            while (status := self._status()).state == PoolState.STOPPING.value:
                self._reconcile()
                if on_progress:
                    on_progress(status)
                if waited_since(began) > DOWN_PATIENCE:
                    why = f": {status.reason}" if status.reason else ""
                    raise ScaleError(
                        f'pool "{self._name}" is not down after {DOWN_PATIENCE:.0f} s{why}; run `shoal sweep` to try '
                        "again",
                        {node.name: node.error or node.state for node in status.leaving},
                    )
                pause(began)

    def until_settled(self) -> None:
        """Wait after a rollback until no surplus or failed node is left, or DOWN_PATIENCE seconds have passed."""
        began = time.monotonic()
        with self._giving_up_turn():
            while waited_since(began) < DOWN_PATIENCE:
                self._reconcile()
                status = self._status()
                stopping = status.state == PoolState.STOPPING.value
                left = status.failed or status.leaving or len(status.active) + len(status.pending) > status.target
                if not left and not stopping:
                    return
                pause(began)

    @contextmanager
    def _giving_up_turn(self) -> Iterator[None]:
        """Let another waiting process reconcile the pool after the ``with`` block; see `reconcile.election`."""
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

    def _progress(self, operation: Operation) -> tuple[PoolStatus, int]:
        """Return the pool's status, and the number of ready nodes that an operation may use. The operation of a lease
        cannot use the nodes that earlier leases take."""
        with self._store.reading() as session:
            snapshot = rows.load(session, self._name, lock=False)
        status = status_of(snapshot, self._clock())
        lease = next((lease for lease in snapshot.leases if lease.id == operation.lease_id), None)
        active = len(status.active)
        return status, nodes_for(snapshot, lease, active) if lease else active


def end_if_abandoned(store: Store, name: str) -> None:
    """End an embedded pool whose process has ended, with the pool's jobs, and wait until nothing of it is left. Do
    nothing to any other pool.

    The reconciler does the same, but it may be killed together with the process, or a moment later.

    Raises:
        ScaleError: A node could not be ended. The message names the remaining processes.
    """
    if not is_embedded(store, name):
        return
    with suppress(PoolNotFoundError):
        with store.reading() as session:
            snapshot = rows.load(session, name, lock=False)
        if owner_has_ended(snapshot.pool) and (snapshot.pool.state is not PoolState.UP or is_abandoned(snapshot)):
            reconcile(store, name)
            Waiting(store, name, time.time).until_down()
            reconcile(store, name)


def pause(began: float) -> None:
    """Sleep for a tenth of the time waited so far, but at least WAIT_PERIOD and at most WAIT_PERIOD_MOST."""
    time.sleep(min(max(WAIT_PERIOD, (time.monotonic() - began) / 10), WAIT_PERIOD_MOST))


def _rolled_back_to(operation: Operation) -> str:
    if operation.kind is OperationKind.LEASE and operation.replaced_size is None:
        return "; the lease was removed"
    if operation.replaced_size is None:
        return "; all nodes that it had started were ended"
    return f"; rolled back to {operation.replaced_size}"


class Turn:
    """The turn to reconcile a pool: while one process has the turn, the other waiting processes do not reconcile.

    The turn is a file. Its content names the process that has the turn, and its modification time is the time at which
    this process last took it. Turns only save work. If two processes take the turn at the same instant, both reconcile
    the pool, which is safe.

    Args:
        pool: Name of the pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = lock_file(f"waiting-{pool}")
        self._me = uuid4().hex

    def take(self) -> bool:
        """Take or keep the turn to reconcile the pool. Return False if another process took the turn less than
        TURN_PATIENCE seconds ago."""
        # The file contains the id of the process that has the turn. If the file's age is negative, the clock was set
        # back. This process then takes the turn.
        if not self._is_mine() and 0 <= self._age() < TURN_PATIENCE:
            return False
        # If the disk is full, the file cannot be written, and each waiting process reconciles the pool. This is safe.
        with suppress(OSError):
            self._path.write_text(self._me)
        return True

    def give_up(self) -> None:
        """Give up the turn by removing the file that records this process's turn. Another process can then take the
        turn at once."""
        if self._is_mine():
            self._path.unlink(missing_ok=True)

    def _age(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except OSError:
            return TURN_PATIENCE

    def _is_mine(self) -> bool:
        try:
            return self._path.read_text() == self._me
        except OSError:
            return False
