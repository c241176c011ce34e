"""Trigger that waits for the nodes of a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select

from shoal.airflow.triggers.base import Update, Wait, WaitTrigger, isolated
from shoal.errors import PoolNotFoundError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.journal import rows
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.status import PoolStatus, status_of
from shoal.state import Store
from shoal.state.schema import Operation, OperationState

_RENEW_S = 60.0
"""Seconds between two renewals of a lease during a wait, far below the lease's time to live of 15 minutes."""


class PoolWait(Wait):
    """Object that waits for nodes of a pool, or for the end of an operation (a request to change the pool's size).

    Args:
        trigger: The trigger that waits. If it has no `nodes`, only the end of the operation ends the wait; if it has no
            `operation_id`, the wait is only for nodes.
    """

    def __init__(self, trigger: PoolTrigger) -> None:
        super().__init__(trigger.poll_interval)
        self.pool = trigger.pool
        self.holder = trigger.holder
        self.nodes = trigger.nodes
        self.operation_id = trigger.operation_id
        self._client: ComputePool | None = None
        self._renewed = time.monotonic()
        self._shown = ""

    @classmethod
    def look_at_all(cls, store: Store, waits: Collection[PoolWait]) -> None:
        """Read the rows of each pool once, and send an update to each wait for this pool."""
        operations = [wait.operation_id for wait in waits if wait.operation_id is not None]
        with store.reading(snapshot=False) as session:
            query = select(Operation.id).where(Operation.id.in_(operations), Operation.state == OperationState.OPEN)
            is_open = set(session.scalars(query)) if operations else set()
        for name in {wait.pool for wait in waits}:
            with isolated(f"pool {name}"):
                cls._look_at_pool(store, name, [wait for wait in waits if wait.pool == name], is_open)

    @classmethod
    def _look_at_pool(cls, store: Store, name: str, waits: Collection[PoolWait], is_open: Collection[str]) -> None:
        try:
            with store.reading() as session:
                snapshot = rows.load(session, name, lock=False)
        except PoolNotFoundError:
            for wait in waits:
                wait.send(Update(is_over=True))
            return
        status = status_of(snapshot, time.time())
        for wait in waits:
            with isolated(f"a wait for pool {name}"):
                wait._see(store, snapshot, status, is_open)

    def _see(self, store: Store, snapshot: Snapshot, status: PoolStatus, is_open: Collection[str]) -> None:
        text = f"pool {self.pool}: {status.progress(self.holder)}"
        lines = [text] if text != self._shown else []
        self._shown = text
        if self._client is None:
            self._client = ComputePool(self.pool, holder=self.holder, store=store)
        is_over = self.operation_id is not None and self.operation_id not in is_open
        if not is_over and self.nodes is not None:
            try:
                is_over = self._client.has_nodes(self.nodes, snapshot=snapshot)
            except ScaleError:  # The wait ends. The task continues in a worker and raises this error.
                is_over = True
        if lines or is_over:
            self.send(Update(lines, is_over=is_over))
        now = time.monotonic()
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            self.wanted = self._client.renew


@dataclass(kw_only=True, eq=False, repr=False)
class PoolTrigger(WaitTrigger):
    """Trigger that waits for nodes of a pool, or for the end of a request for nodes, and renews the DAG run's lease.

    :param pool: Name of the pool.
    :param holder: Name of the holder whose lease is renewed.
    :param nodes: Number of ready nodes with which the wait is over.
    :param operation_id: Id of the operation that requests the nodes. If a user marks or clears the task, the operation
        is rolled back, unless it has ended or a newer operation has replaced it.
    """

    pool: str
    holder: str
    nodes: int | None = None
    operation_id: str | None = None

    def new_wait(self) -> PoolWait:
        """Create the `Wait` object through which the poller of this process sends updates to this trigger."""
        return PoolWait(self)

    async def end(self) -> None:
        """Roll back the request for nodes that the task waits for, unless the request has already ended."""
        if self.operation_id is not None:
            await asyncio.to_thread(self._withdraw, self.operation_id)

    def _withdraw(self, operation_id: str) -> None:
        pool = ComputePool(self.pool, holder=self.holder)
        if pool.withdraw(operation_id, "the deferred task was marked or cleared"):
            self.log.info("the request for nodes of pool %s is rolled back", self.pool)
