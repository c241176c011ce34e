"""Lease nodes of a pool for a block of code (`pool_lease`), and clean up after flow runs: hooks of a run that ends,
and a function that ends what ended runs have left."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import anyio
from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import MissingContextError, ObjectNotFound
from prefect.flows import Flow
from prefect.logging import get_logger

from shoal.jobs import AnyJobSpec, clean_up, cleanup
from shoal.jobs.cleanup import RunEnd
from shoal.pool.api import ComputePool, PoolLease
from shoal.pool.timeouts import LEASE_TTL
from shoal.prefect.blocks import ComputePool as PoolBlock
from shoal.prefect.blocks import PoolSource, defines, pool_of
from shoal.prefect.current_run import ENGINE, Block, ancestors, current_holder, holder_of, in_thread
from shoal.prefect.job_task import planner_of
from shoal.prefect.reports import NodeLog


def pool_lease(
    size: int | str,
    *,
    plan_for: AnyJobSpec | Mapping[str, Any] | None = None,
    exclusive: bool = False,
    pool_name: PoolSource = None,
    ttl: float = LEASE_TTL,
    options: Mapping[str, Any] | None = None,
) -> PoolLeaseContext:
    """Lease at least `size` nodes of a pool for a ``with`` or ``async with`` block of a flow.

    At the start of the block, the context manager leases the nodes and waits until they are ready. If the pool is down
    and `pool_name` is a URI or block, the pool is brought up. If the nodes do not become ready, the lease is rolled
    back, and a pool that was brought up for the lease goes down again. During the block, the context manager renews the
    lease.

    At the end of the block, the context manager waits for the task runs that the block started with ``.submit`` or
    ``.map``. Then the context manager cancels the jobs of the block that still run, releases the lease, and ends
    nodes on this host that no lease and no base demand needs. After an exception in the block, the context manager
    cleans up in the same way, without waiting for the task runs. A pool that was brought up for a lease goes down when
    its last lease is released.

    A task run that fails does not end the other task runs. Call ``.result()`` only after the block: inside the block,
    the error that ``.result()`` raises for a failed task run would end the block and cancel the jobs of the other task
    runs.

    Each block has a lease of its own. Blocks may be nested, and several tasks of a flow run may have blocks at the same
    time: the end of a block does not end the jobs and the lease of another one. The jobs of a block are those that are
    submitted inside it, also by its tasks in other threads. If a task runs in another process, such as with
    ``ProcessPoolTaskRunner``, its jobs belong to the flow run, and end with the run.

    Args:
        size: Number of nodes, including the head node; or "auto", with `plan_for`. If the pool is down, one node is
            leased first, on which the size is planned.
        plan_for: Spec of a boosting training, or its fields, for the size "auto": the smallest number of nodes is
            planned on which the training fits into the memory. A repeated flow run uses the same number.
        exclusive: Lease these nodes in addition to the nodes of all other leases. If all leases together would exceed
            MAX_NODES, the lease waits in the pool's queue, at most until the deadline (``rollback_after_seconds``). By
            default, all runs share the nodes of the largest lease.
        pool_name: Name, URI or block of the pool.
        ttl: Seconds after which the lease expires if it is not renewed, for example because this process was killed.
        options: Dict that may contain ``rollback_after_seconds`` (seconds until the deadline; default: 720) and
            ``block_until_min_cluster_size`` (number of ready nodes that are enough for the block to begin),
            ``max_lifetime`` (seconds after which the lease and its jobs are ended) and ``budget_node_hours``
            (node-hours after which the lease and its jobs are ended).

    Returns:
        A context manager that yields the pool.

    Raises:
        ScaleError: At the deadline, the lease still waited in the queue, or its nodes were not ready. The lease has
            been rolled back.
        PoolDownError: The pool is down, and `pool_name` is only a name.
        InvalidArgumentError: `size` exceeds MAX_NODES, alone or together with the blocks around an exclusive lease; or
            an option is invalid.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4") as pool:
        ...     trainings = distributed_train.map(specs, pool_name=pool.name)
        >>> results = trainings.result()
    """
    request = {"size": size, "plan_for": plan_for, "exclusive": exclusive, "ttl": ttl, "options": options}
    return PoolLeaseContext(pool_name, request)


class PoolLeaseContext:
    """Context manager that leases nodes for a ``with`` or ``async with`` block. `pool_lease` returns such an object."""

    def __init__(self, source: PoolSource, request: Mapping[str, Any]) -> None:
        self._source = source
        self._request = request
        self._block: Block
        self._pool: ComputePool
        self._lease: PoolLease | None = None

    def __enter__(self) -> ComputePool:
        self._open_block()
        try:
            pool = self._enter(NodeLog(self._block.holder))
            self._block.begin()
        except BaseException:
            # Python does not call __exit__ after an error in __enter__, so the lease is released here.
            self._release()
            raise
        return pool

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._block.end()
        self._leave(wait=error is None)

    async def __aenter__(self) -> ComputePool:
        self._open_block()
        log = NodeLog(self._block.holder)
        try:
            pool = await in_thread(lambda: self._enter(log), log.interrupt)
            self._block.begin()
        except BaseException:
            # Python does not call __aexit__ after an error in __aenter__, so the lease is released here. For example,
            # the task may have been cancelled right after the lease was granted.
            with anyio.CancelScope(shield=True):
                await in_thread(self._release)
            raise
        return pool

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._block.end()
        await in_thread(lambda: self._leave(wait=error is None), self._block.submissions.interrupt)

    def _open_block(self) -> None:
        run = current_holder()
        if run is None:
            raise MissingContextError(
                "pool_lease was called neither in a flow nor in a task: call it in a flow or task, or use "
                "shoal.ComputePool.lease instead"
            )
        self._block, self._lease = Block(run), None

    def _enter(self, log: NodeLog) -> ComputePool:
        self._pool = pool_of(self._source, holder=self._block.holder, ancestors=ancestors())
        self._block.pool, plan_for = self._pool.name, self._request["plan_for"]
        self._lease = self._pool.lease(
            **{**self._request, "plan_for": plan_for and planner_of(self._pool, plan_for)},
            bring_up=defines(self._source),
            may_redefine=isinstance(self._source, PoolBlock),
            on_progress=log,
        )
        self._lease.__enter__()  # This call starts the thread that renews the lease.
        return self._pool

    def _release(self) -> None:
        """Release the lease if it was granted."""
        try:
            if self._lease is not None:
                self._lease.release()
        finally:
            self._block.free_name()

    def _leave(self, *, wait: bool) -> None:
        with ExitStack() as at_end:
            at_end.callback(self._release)
            at_end.callback(clean_up, self._pool.name, self._block.holder, reason="its pool_lease ended")
            if wait:
                self._block.submissions.wait()


def clean_up_run(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Cancel a flow run's jobs and release its leases on all pools, and those of its subflows.

    Use this function as hook for `on_failure`, `on_crashed` and `on_cancellation`. After a cancellation, the hook also
    cancels the jobs of deployments that the run has started with ``run_deployment``. The hook of a subflow ends only
    the jobs and leases of the subflow.

    Prefect calls a cancellation hook in the process that serves the flow or, for a work pool of processes, in the
    worker (Prefect 3.7) or in a process of its own (3.8). This process needs the same ``$SHOAL_HOME`` or
    ``$SHOAL_STATE_URL`` as the flow.

    Args:
        flow: The flow.
        flow_run: Run of the flow.
        state: Final state of the run.

    Example:
        >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
        ... def retrain(): ...
    """
    end = end_as(state)
    for sentence in cleanup.clean_up_everywhere(
        holder_of(flow_run.id), reason=end.reason, is_cancelled=end.is_cancelled
    ):
        get_logger("shoal").info(sentence)


def end_as(state: State) -> RunEnd:
    """Return the end of a flow run from its final state."""
    return RunEnd(
        f"its Prefect run ended as {state.name}",
        is_cancelled=state.is_cancelled() or state.is_cancelling(),
        # An automation marks a run as crashed if the server has got no heartbeat, for example because it was too busy.
        is_doubtful=state.is_crashed(),
    )


def clean_up_ended_runs() -> list[str]:
    """Cancel the jobs and release the leases of all flow runs that have ended, and those of their subflows.

    Call this function in a flow that runs periodically. A run that this Prefect server does not know may belong to
    another server. So the jobs and leases of an unknown run are not changed. The leases of an unknown run expire when
    they are no longer renewed.

    A run that is marked as crashed may go on, because the server has only missed its heartbeats. The function leaves
    such a run alone while a process waits for one of its jobs.

    Returns:
        One sentence for each action, and for each crashed run that was left alone.
    """
    with get_client(sync_client=True) as client:

        def end_of(run_id: str) -> RunEnd | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            # If a user has chosen the name of a lease's holder, `run_id` is not a UUID, and `UUID` raises ValueError.
            # If the flow run belongs to another Prefect server, the client raises ObjectNotFound.
            except (ValueError, ObjectNotFound):
                return None
            return end_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, end_of)
