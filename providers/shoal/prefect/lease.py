"""Provide `pool_lease`, a context manager that leases nodes of a pool for a block of code."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from shoal.jobs import clean_up
from shoal.pool.api import ComputePool
from shoal.pool.lease_renewal import PoolLease
from shoal.pool.timeouts import LEASE_TTL
from shoal.prefect._progress import NodeLog
from shoal.prefect._run_holder import current_holder, in_thread
from shoal.prefect.blocks import PoolSource, defines, pool_of

if TYPE_CHECKING:
    from prefect.futures import PrefectFuture
    from prefect.task_runners import TaskRunner


def pool_lease(
    size: int,
    *,
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
    ``.map``. Then the context manager cancels the jobs of the flow run that still run, releases the lease, and ends
    nodes on this host that no lease and no base demand needs. After an exception in the block, the context manager
    cleans up in the same way, without waiting for the task runs. A pool that was brought up for a lease goes down when
    its last lease is released.

    A task run that fails does not end the other task runs. Call ``.result()`` only after the block: inside the block,
    the error that ``.result()`` raises for a failed task run would end the block and cancel the jobs of the other task
    runs.

    A flow run can have only one lease on a pool, so do not nest two blocks of `pool_lease` for the same pool.

    Args:
        size: Number of nodes, including the head node.
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
        InvalidArgumentError: `size` exceeds MAX_NODES, or an option is invalid.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4") as pool:
        ...     trainings = distributed_train.map(specs, pool_name=pool.name)
        >>> results = trainings.result()
    """
    return PoolLeaseContext(pool_name, {"size": size, "exclusive": exclusive, "ttl": ttl, "options": options})


class PoolLeaseContext:
    """Context manager that leases nodes for a ``with`` or ``async with`` block. `pool_lease` returns such an object.

    Args:
        source: Name, URI or block of the pool.
        request: Arguments of `ComputePool.lease`.
    """

    def __init__(self, source: PoolSource, request: Mapping[str, Any]) -> None:
        self._source = source
        self._request = request
        self._pool: ComputePool | None = None
        self._lease: PoolLease | None = None
        self._submissions = Submissions()

    def __enter__(self) -> ComputePool:
        holder = self._holder()
        try:
            pool = self._enter(holder, NodeLog(holder))
            self._submissions.begin()
        except BaseException:
            # Python does not call __exit__ after an error in __enter__, so the lease is released here.
            self._release()
            raise
        return pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._submissions.end()
        self._leave(wait=error is None)

    async def __aenter__(self) -> ComputePool:
        holder = self._holder()
        log = NodeLog(holder)
        try:
            pool = await in_thread(lambda: self._enter(holder, log), log.interrupt)
            self._submissions.begin()
        except BaseException:
            # Python does not call __aexit__ after an error in __aenter__, so the lease is released here. For example,
            # the task may have been cancelled right after the lease was granted.
            with anyio.CancelScope(shield=True):
                await in_thread(self._release)
            raise
        return pool

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._submissions.end()
        await in_thread(lambda: self._leave(wait=error is None), self._submissions.interrupt)

    @staticmethod
    def _holder() -> str:
        holder = current_holder()
        if holder is None:
            raise MissingContextError(
                "pool_lease was called neither in a flow nor in a task: call it in a flow or task, or use "
                "shoal.ComputePool.lease instead"
            )
        return holder

    def _enter(self, holder: str, log: NodeLog) -> ComputePool:
        self._lease = None
        self._pool = pool_of(self._source, holder=holder)
        self._lease = self._pool.lease(**self._request, bring_up=defines(self._source), on_progress=log)
        self._lease.__enter__()  # This call starts the thread that renews the lease.
        return self._pool

    def _release(self) -> None:
        """Release the lease if it was granted."""
        if self._lease is not None:
            self._lease.release()

    def _leave(self, *, wait: bool) -> None:
        assert self._pool is not None and self._lease is not None
        try:
            if wait:
                self._submissions.wait()
        finally:
            try:
                clean_up(self._pool.name, self._pool.holder, reason="its pool_lease ended")
            finally:
                self._lease.__exit__(None, None, None)


_recording: ContextVar[tuple[Submissions, ...]] = ContextVar("_recording", default=())
"""The `Submissions` objects that record the task runs of the current code. Each coroutine of a flow has its own value,
so that concurrent coroutines do not record each other's task runs."""


class Submissions:
    """Record of the task runs that a flow or its tasks start with ``.submit`` or ``.map`` between `begin` and `end`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[PrefectFuture[Any]] = set()
        self._interrupted = False

    def begin(self) -> None:
        """Start recording the task runs that the current flow or task submits. Call `end` to stop the recording."""
        flow = FlowRunContext.get()
        if flow is not None:  # Only code in a flow run can submit tasks.
            _record_submissions_of(flow.task_runner)
            _recording.set((*_recording.get(), self))

    def end(self) -> None:
        """Stop recording. The task runs that are already recorded stay recorded, so that `wait` waits for them."""
        _recording.set(tuple(one for one in _recording.get() if one is not self))

    def add(self, future: PrefectFuture[Any]) -> None:
        """Record a task run."""
        with self._changed:
            self._running.add(future)
        future.add_done_callback(self._discard)

    def wait(self) -> None:
        """Wait until all recorded task runs have ended, successfully or not, or until `interrupt` is called."""
        with self._changed:
            if self._running:
                get_run_logger().info(
                    "pool_lease waits for %d submitted task runs before it releases the nodes", len(self._running)
                )
            self._changed.wait_for(lambda: self._interrupted or not self._running)

    def interrupt(self) -> None:
        """Make `wait` return even if task runs have not ended. This method may be called from any thread."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def _discard(self, future: PrefectFuture[Any]) -> None:
        with self._changed:
            self._running.discard(future)
            self._changed.notify_all()


def _record_submissions_of(runner: TaskRunner[Any]) -> None:
    """Replace the method `submit` of a flow run's task runner by a method that also records each future.

    The replacement is needed because Prefect keeps no list of submitted task runs. Each future is passed to all objects
    in `_recording`.
    """
    if "submit" in vars(runner):
        return
    submit = runner.submit

    def submit_and_record(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        for submissions in _recording.get():
            submissions.add(future)
        return future

    # `TaskRunner.map` calls `submit`, so mapped task runs are recorded, too. Each flow run has its own runner, so other
    # flow runs are not affected.
    vars(runner)["submit"] = submit_and_record
