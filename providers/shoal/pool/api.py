"""The class `ComputePool`, by which all parts of shoal start, scale, lease and end pools; the lease in the hands of its
holder; and the same as plain functions, some of which work on all pools, such as `list_pools`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib import import_module
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.background_threads import BackgroundThread
from shoal.errors import FencedError, InvalidArgumentError, ScaleError, StoreError, shown
from shoal.os_processes import ProcessId
from shoal.pool import bound_host, reconciling
from shoal.pool.backends import backend_of, preflight
from shoal.pool.backends.interface import Finding, Seen
from shoal.pool.bound_host import is_here
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import Ancestors, asking_team, python_holder, runs_around, stored_team
from shoal.pool.journal import commands, rows, usage
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.pool.journal.usage import USAGE_DAYS, HolderUsage
from shoal.pool.reconciling import Clock, reconcile, sweep
from shoal.pool.scaling_plan import Snapshot, nodes_for
from shoal.pool.selection import which_pool
from shoal.pool.spec import (
    LeaseOptions,
    PoolSpec,
    ScaleOptions,
    checked_size,
    is_auto,
    is_uri,
    pool_name_of,
    spec_of_row,
)
from shoal.pool.status import NodeInfo, PoolReport, PoolStatus, check_nodes, head_endpoint, report_of, status_of
from shoal.pool.timeouts import LEASE_TTL, RETIRE_WITHIN, ROLLBACK_AFTER
from shoal.pool.waiting import OnProgress, Requests, pause
from shoal.state import Store, stamps
from shoal.state.databases import storable
from shoal.state.schema import ActionKind, Lease, Operation, Pool, PoolState

_PLANNER = "shoal.kinds.plan.call"
"""Module with the function `planned_size`."""

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

    def __exit__(self, *error: object) -> None:
        self.release()

    def _renew_until(self, ended: threading.Event) -> None:
        def renew() -> None:
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

        BackgroundThread(renew, name=f"lease-{self.id}", stop=ended.set).start()


log = logging.getLogger("shoal.pool")


class ComputePool:
    """A compute pool: a named set of nodes that can be scaled.

    Args:
        source: A URI (``local://retrain?max_nodes=4``), a `PoolSpec`, or the name of an existing pool. Default: the
            pool that `shoal.pool.selection.which_pool` selects.
        holder: Name under which this object requests nodes. Default: a name made from user, host and process id.
        ancestors: Holders whose end is also the end of this object's leases. Default: none.
        team: Team for which this object acts. Its leases count to the quota of this team (see :meth:`set_quota`), and
            it may use pools with ``only_team`` of this team. ``"*"``: an administrator, who acts for all teams.
            Default: ``$SHOAL_TEAM``, else no team.
        store: The state store. Default: ``$SHOAL_STATE_URL``, else SQLite in ``$SHOAL_HOME``.
        clock: Function that returns seconds since the epoch. Tests pass a simulated clock.
        is_named: Whether the user has named the pool. False: `source` is from a row of the store, so it is no reason to
            record the pool in this home (`shoal.pool.bound_host`).

    Raises:
        InvalidArgumentError: The URI or spec is invalid.
        NoPoolError: No pool was named, and the store contains no pool or several possible pools.
        PoolNotFoundError: No pool has this name.

    Example:
        >>> pool = ComputePool("local://retrain?max_nodes=4").up()
        >>> pool.scale(3)
        True
        >>> pool.down()
    """

    def __init__(
        self,
        source: str | PoolSpec | None = None,
        *,
        holder: str | None = None,
        ancestors: Ancestors | None = None,
        team: str | None = None,
        store: Store | None = None,
        clock: Clock = time.time,
        is_named: bool = True,
    ) -> None:
        if not isinstance(source, str | PoolSpec | None):  # None selects a pool, and no other object may select one.
            raise InvalidArgumentError(
                f"a pool cannot be given by an object of type {type(source).__name__}: give its name, its URI or a "
                "PoolSpec"
            )
        self._spec = PoolSpec.parse(source) if isinstance(source, PoolSpec) or (source and is_uri(source)) else None
        self._store = store or Store()
        self._clock = clock
        name = source if isinstance(source, str) else None
        if self._spec is not None:
            self.name = self._spec.name
            if (pool := self._store.get(Pool, self.name)) is not None:
                bound_host.accept(pool, self._spec)
        elif name and not is_named:
            self.name = name
        else:
            self.name = which_pool(self._store, name, team=team)
        self.holder = storable(holder or python_holder())
        self.ancestors = ancestors
        team = asking_team(team)
        self.team = stored_team(team)
        self._requests = Requests(self._store, self.name, self.holder, self._clock, self._spec, team=team)

    def __repr__(self) -> str:
        return f"ComputePool({self.name!r})"

    def up(
        self,
        *,
        rollback_after_seconds: float = ROLLBACK_AFTER,
        on_progress: OnProgress | None = None,
        owner: ProcessId | None = None,
    ) -> ComputePool:
        """Start the pool with MIN_NODES nodes and wait until these nodes are ready.

        If the pool is already up, only wait until MIN_NODES nodes are ready.

        For a `ray://` or `kuberay://` pool, the method also checks the cluster's nodes (see :meth:`check_nodes`), and
        logs a warning for each problem.

        Args:
            rollback_after_seconds: Seconds until the deadline. If fewer than MIN_NODES nodes are ready at the deadline,
                all started nodes are ended.
            on_progress: Function called with the pool's status while waiting.
            owner: Process to which the pool belongs (an embedded pool). The pool is removed when this process ends.
                Default: the pool belongs to no process and stays.

        Returns:
            The pool itself.

        Raises:
            ScaleError: The nodes did not become ready and were all ended.
            InvalidArgumentError: The pool is already up with other settings.
        """
        if not rollback_after_seconds > 0:
            raise InvalidArgumentError(
                f"rollback_after_seconds={rollback_after_seconds}: it has to be a number of seconds above 0"
            )
        self._requests.admit(1, bring_up=True)

        def request(session: Session) -> str:
            spec = self._requests.spec_to_start(session)
            operation_id = commands.up(
                session, spec, holder=self.holder, rollback_after=rollback_after_seconds, now=self._clock()
            )
            self._requests.record(session, ActionKind.STARTED, _nodes(spec.min_nodes), operation_id=operation_id)
            return operation_id

        self._requests.carry_out(request, bring_up=True, may_redefine=True, owner=owner, on_progress=on_progress)
        self.check_nodes()
        return self

    def down(self, *, abandon: bool = False, on_progress: OnProgress | None = None) -> None:
        """End all nodes of the pool, and wait until the processes of these nodes have ended.

        The jobs on the pool end, too. If the pool is already down, the method does nothing.

        Args:
            abandon: Mark a `ray://` pool as down without contacting its Ray cluster. Use this only for a cluster that
                never answers again. If the cluster answers again later, its autoscaler keeps the nodes that this pool
                has requested, because the request was not withdrawn.
            on_progress: Function called with the pool's status while waiting.

        Raises:
            ScaleError: A node could not be ended. The message names the remaining processes.
            InvalidArgumentError: `abandon` was given for a local pool.
        """
        with self._requests.changing() as session:
            was_down = rows.load(session, self.name).pool.state is PoolState.DOWN
            (commands.abandon if abandon else commands.down)(session, self.name, self._clock())
            if not was_down:
                self._requests.record(session, ActionKind.STOPPED, "abandoned" if abandon else None)
            if abandon:
                return
        reconciling.ensure_running()
        self._requests.waiting.until_down(on_progress)

    def delete(self, *, abandon: bool = False) -> None:
        """Delete a pool that is down: its rows in the database, its token and its logs. Its ended jobs stay in the list
        of jobs.

        Args:
            abandon: Delete the pool although its host or Ray cluster cannot be reached. If the host is reachable again
                later, the pool's nodes on this host end, because their rows in the database are missing.

        Raises:
            PoolInUseError: The pool is not down, or has unfinished jobs, and `abandon` is False. Nothing was deleted.
            PoolElsewhereError: The pool is bound to another host, and only that host can end its nodes. If the host
                never returns, use `abandon`.
            InvalidArgumentError: `abandon` was given for a local pool of this host.
        """
        with self._requests.changing(JournalStep.TIDY) as session:
            spec = spec_of_row(rows.load(session, self.name).pool.spec)
            commands.remove(session, self.name, self._clock(), abandon=abandon)
            self._requests.record(session, ActionKind.DELETED, "abandoned" if abandon else None)
            if spec is not None:
                backend_of(spec).discard(self.name, everything=True)

    def scale(
        self,
        expected_cluster_size: int | str,
        *,
        plan_for: Any = None,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> bool:
        """Set the number of nodes that the pool should have; see `scale_cluster`."""
        ScaleOptions.parse(options or {})
        is_planned = is_auto(expected_cluster_size, plan_for)
        size = checked_size(self._planned(plan_for) if is_planned else expected_cluster_size)
        parsed = ScaleOptions.for_size(options, size)
        self._requests.admit(size)

        def request(session: Session) -> str:
            operation_id = commands.scale(
                session, self.name, size, holder=self.holder, options=parsed, now=self._clock()
            )
            before = session.get_one(Operation, operation_id).replaced_size
            change = _nodes(size) if before is None else f"{before} -> {_nodes(size)}"
            self._requests.record(session, ActionKind.SCALED, change, operation_id=operation_id)
            return operation_id

        self._requests.carry_out(request, is_async=is_async, on_progress=on_progress)
        return True

    def lease(
        self,
        size: int | str,
        *,
        plan_for: Any = None,
        exclusive: bool = False,
        ttl: float = LEASE_TTL,
        bring_up: bool = False,
        may_redefine: bool = False,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
        owner: ProcessId | None = None,
    ) -> PoolLease:
        """Request nodes for this holder (the name under which this object makes requests). The lease lasts until it
        is released or expires.

        All shared leases use the same nodes. An exclusive lease adds its own nodes to the pool. The number of nodes is
        the size of the largest shared lease plus the sizes of all exclusive leases, or the base demand (the size that
        `up` or `scale` has set) if this is larger. A lease does not reserve particular nodes, because Ray decides where
        work runs.

        Leases are granted in the order of their requests. A lease that does not fit into MAX_NODES beside the earlier
        leases waits, and takes no nodes until it is granted. While this method waits, it renews the lease.

        Each holder has at most one lease on a pool. A second request renews that lease with the new size. If the nodes
        are not ready at the deadline, the lease is rolled back, and a pool that was started for the lease goes down
        again. The deadline includes the time in the queue.

        Args:
            size: Number of nodes, including the head; or "auto", with `plan_for`. If the pool is down, one node is
                leased first, on which the size is planned.
            plan_for: Spec of a boosting training, or its fields, for the size "auto": the smallest number of nodes is
                planned on which the training fits into the memory, from the data that the pool's head reads (see
                `shoal.plan`). Or a function that returns the number.
            exclusive: Add these nodes to the nodes of all other leases, instead of sharing the nodes of shared leases.
            ttl: Seconds after which a lease that is not renewed expires.
            bring_up: Start the pool if it is down. The pool goes down again after its last lease and job, unless
                `scale_cluster` or `up` has set a base demand in the meantime.
            may_redefine: Whether the definition that this object has got, for example from an Airflow connection,
                replaces that of another DAG or user if the pool is down. By default, the lease is refused.
            is_async: Return as soon as the request is written to the database.
            options: The same options as for `scale_cluster`, and two limits, after which the lease and its jobs are
                ended, even if the holder is dead. ``max_lifetime`` is the number of seconds after the grant.
                ``budget_node_hours`` is the number of node-hours that the holder's leases on this pool may use.
            on_progress: Function called with the pool's status while waiting.
            owner: Process to which a started pool belongs (an embedded pool). The pool is removed when this process has
                ended and no job has a lease on it (`shoal.pool.holder.job_holder`).

        Returns:
            The lease. In a ``with`` block, the lease is renewed until the end of the block, and then released.

        Raises:
            InvalidArgumentError: The size is above MAX_NODES, an option is invalid, or this holder requests a shared
                lease and has an exclusive one, or the other way round. Or another DAG or user has defined the pool
                otherwise, and `may_redefine` is False.
            PoolDownError: The pool is not up, and `bring_up` is False.
            BudgetError: The run has used up its budget of node-hours, or the request is above the quota of its team.
            ScaleError: At the deadline the lease still waited or its nodes were not ready, and the lease was rolled
                back. Or this holder already has a granted lease, and the pool has no room for the larger size.

        Example:
            >>> with pool.lease(3):
            ...     estimator.fit(...)
        """
        request: dict[str, Any] = {"exclusive": exclusive, "ttl": ttl, "bring_up": bring_up, "owner": owner}
        request |= {"may_redefine": may_redefine, "on_progress": on_progress}
        if not is_auto(size, plan_for, "size"):
            return self._lease(size, options, is_async=is_async, **request)
        LeaseOptions.parse(options or {})
        pool = self._store.get(Pool, self.name)
        if not bring_up or (pool is not None and pool.state is PoolState.UP):
            return self._lease(self._planned(plan_for), options, is_async=is_async, **request)
        first = self._lease(1, {**(options or {}), "block_until_min_cluster_size": None}, is_async=False, **request)
        try:
            with first.renewed():
                planned = self._planned(plan_for)
            return self._lease(planned, options, is_async=is_async, **request)
        except BaseException:
            first.release()
            raise

    def _planned(self, plan_for: Any) -> int:
        """Return the number of nodes that a training needs."""
        # A plan is a job, and pools know no jobs.
        return int(plan_for() if callable(plan_for) else import_module(_PLANNER).planned_size(self, plan_for))

    def _lease(
        self, size: Any, options: Mapping[str, Any] | None, *, exclusive: bool, ttl: float, bring_up: bool, **more: Any
    ) -> PoolLease:
        """Lease a number of nodes; see :meth:`lease`."""
        size = checked_size(size, "size")
        parsed = LeaseOptions.for_size(options, size)
        if not ttl > 0:
            raise InvalidArgumentError(f"ttl={ttl}: it has to be a number of seconds above 0")
        if not isinstance(exclusive, bool):
            raise InvalidArgumentError(f"exclusive={shown(exclusive)}: it has to be True or False")
        self._requests.admit(size, bring_up=bring_up)
        leases: list[Lease] = []

        def handle() -> PoolLease:
            lease = leases[-1]
            return PoolLease(self._store, lease.id, lease.epoch, ttl, self.release, clock=self._clock)

        @contextmanager
        def renewed() -> Iterator[None]:
            if leases[-1].waiting:
                # If the store does not answer, this log line is left out. The wait below tries again until the store
                # answers.
                with suppress(StoreError):
                    note = self.describe().queue_note(self.holder)
                    log.info('pool "%s": the lease of %s is %s', self.name, self.holder, note or "granted")
            with handle().renewed():
                yield

        def request(session: Session) -> str:
            operation_id, lease = commands.lease(
                session,
                self.name,
                size,
                exclusive=exclusive,
                holder=self.holder,
                ttl=ttl,
                options=parsed,
                now=self._clock(),
                team=self.team,
                ancestors=self.ancestors,
            )
            leases.append(lease)
            self._requests.record(
                session,
                ActionKind.LEASED,
                _nodes(size) + (", exclusive" if exclusive else ""),
                subject=self.holder,
                operation_id=operation_id,
            )
            return operation_id

        self._requests.carry_out(request, bring_up=bring_up, while_waiting=renewed, **more)
        return handle()

    def release(self) -> bool:
        """Release this holder's lease, and the leases of which this holder is an ancestor. Their nodes are ended,
        unless another lease or the base demand (the size that `up` or `scale` has set) needs them.

        A pool that was started by a lease goes down with its last lease and job. If the pool is bound to another host,
        that host's reconciler ends the nodes later, and this method does not wait for their end.

        Returns:
            False if there was no such lease.
        """
        with self._requests.changing() as session:
            released = commands.release(session, self.name, self.holder, self._clock(), team=self._requests.team)
            for holder in released:
                self._requests.record(session, ActionKind.RELEASED, subject=holder)
            here = is_here(session.get_one(Pool, self.name))
        if here:
            reconcile(self._store, self.name, clock=self._clock)
            reconciling.ensure_running()
            self._requests.waiting.until_down()
        return bool(released)

    def renew(self) -> bool:
        """Set the expiry of this holder's lease to now plus the lease's time to live (`ttl`). Return False if the
        holder has no lease any more.

        If the holder is a flow run of Prefect or a block of it, all leases of the run are renewed, and the leases of
        the runs that have called it in this process."""
        with transaction(self._store, JournalStep.REQUEST) as session:
            runs = runs_around(self.holder, self.ancestors)
            return commands.renew_held(session, self.name, runs, self._clock())

    def alter(self, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
        """Change the pool's minimum and maximum size; see `alter_pool`."""
        for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
            if value is not None:
                checked_size(value, name)
        self._requests.admit(min_nodes or 1)
        with self._requests.changing() as session:
            pool = rows.load(session, self.name).pool
            before = _limits(pool)
            commands.alter(session, self.name, min_nodes=min_nodes, max_nodes=max_nodes, now=self._clock())
            self._requests.record(session, ActionKind.ALTERED, f"{before} -> {_limits(pool)}")
        reconciling.ensure_running()

    def get_nodes(self) -> list[NodeInfo]:
        """Return the nodes that are ready to work, the head first. The list is empty while the pool is down."""
        return [NodeInfo(name=node.name, cpus=node.cpus, gpus=node.gpus) for node in self.describe().active]

    @property
    def operation_id(self) -> str | None:
        """Return the id of the last operation (a request to change the pool's size) that this object has made."""
        return self._requests.operation_id

    def wait_for_operation(self, operation_id: str, *, on_progress: OnProgress | None = None) -> None:
        """Wait until an operation that was requested with `is_async` has ended. If the operation failed, raise its
        error.

        If the wait is interrupted, the operation is rolled back.

        Args:
            operation_id: Id of the operation, from :attr:`operation_id`.
            on_progress: Function called with the pool's status while waiting.

        Raises:
            ScaleError: The operation failed, or a newer operation replaced it.
        """
        try:
            with self._store.reading(snapshot=False) as session:
                operation = session.get_one(Operation, operation_id)
            patience = operation.deadline - operation.created_at
            self._requests.waiting.for_operation(operation_id, patience, on_progress)
        except BaseException as error:
            self._requests.give_up(operation_id, error)
            raise

    def withdraw(self, operation_id: str, reason: str) -> bool:
        """Roll back an operation that has not ended, without waiting until its nodes are ended.

        Args:
            operation_id: Id of the operation, from :attr:`operation_id`.
            reason: Text that is stored as the operation's error.

        Returns:
            False if the operation had already ended, for example because a newer operation has replaced it.

        Raises:
            TeamError: The pool or the operation's lease belongs to another team, and another holder has requested the
                operation.
        """
        withdrawn = self._requests.withdraw(operation_id, reason)
        reconciling.ensure_running()
        return withdrawn

    def has_nodes(self, size: int, *, snapshot: Snapshot | None = None, status: PoolStatus | None = None) -> bool:
        """Check whether at least `size` nodes are ready.

        If this holder has a lease, the nodes that earlier leases take do not count. While this holder's lease waits in
        the queue, the result is False.

        Args:
            size: Number of nodes, including the head.
            snapshot: The pool's rows, if the caller has just read them. With None, this method reads the rows.
            status: The status that the caller has built from `snapshot`. With None, this method builds it.

        Raises:
            ScaleError: Fewer nodes are ready, and no lease or demand requests that many. If this holder's last
                operation was rolled back, the message contains the operation's error.
        """
        snapshot = snapshot or rows.read(self._store, self.name)
        status = status or status_of(snapshot, self._clock())
        lease = next((lease for lease in snapshot.leases if lease.holder == self.holder), None)
        ready = nodes_for(snapshot, lease, len(status.active))
        if ready >= size:
            return True
        if nodes_for(snapshot, lease, status.target) >= size or (lease and lease.waiting and lease.size >= size):
            return False
        mine = self._requests.last_rolled_back()
        if mine:
            why = f"the last request of {self.holder} was rolled back: {mine.error}"
        elif status.state != PoolState.UP.value:
            why = f"the pool is {status.state}"
        else:
            why = status.reason or "request more with a lease or scale_cluster"
        whose = f" for the lease of {self.holder}" if lease else ""
        raise ScaleError(
            f'pool "{self.name}" has {ready} of {size} nodes{whose}, and the target of '
            f"the pool is {status.target}: {why}",
            mine.node_errors if mine else None,
        )

    def wait_for_nodes(
        self, size: int, *, timeout: float = ROLLBACK_AFTER, on_progress: OnProgress | None = None
    ) -> list[NodeInfo]:
        """Wait until at least `size` nodes are ready. This method does not request nodes.

        Args:
            size: Number of nodes, including the head.
            timeout: Seconds to wait.
            on_progress: Function called with the pool's status while waiting.

        Returns:
            The ready nodes, the head first.

        Raises:
            ScaleError: No lease or demand requests that many nodes, or the timeout has passed.
        """
        began = time.monotonic()
        while not self.has_nodes(size):
            status = self.describe()
            if on_progress:
                on_progress(status)
            if time.monotonic() > began + timeout:
                note = status.queue_note(self.holder)
                raise ScaleError(
                    f'pool "{self.name}" has {len(status.active)} of {size} nodes after {timeout:g} s'
                    + (f", and the lease of {self.holder} is {note}" if note else ""),
                    {node.name: node.error or node.state for node in (*status.pending, *status.failed)},
                )
            pause(began)
        return self.get_nodes()

    def describe(self) -> PoolStatus:
        """Return the pool's current status. This method never starts or ends nodes."""
        return status_of(rows.read(self._store, self.name), self._clock())

    def retire_node(self, node: str, *, within_s: float = RETIRE_WITHIN) -> None:
        """Announce that a node of a local pool will end soon, for example because the cloud provider stops the machine.

        The pool starts a replacement node. When the replacement is ready, the announced node gets no new work. The
        announced node is ended when it is idle, or after `within_s` seconds. If the pool has MAX_NODES nodes, the
        replacement starts only after the announced node has ended.

        Args:
            node: Name of the node, as `get_nodes` returns it. It must not be the head.
            within_s: Seconds until the node ends.

        Raises:
            PoolNotFoundError: No pool has this name.
            PoolDownError: The pool is not up, or is bound to another machine.
            InvalidArgumentError: The pool has no ready node with this name, the node is the head, or the pool is not
                local.
        """
        if not 0 < within_s < math.inf:
            raise InvalidArgumentError(f"within_s={shown(within_s)}: it has to be a number of seconds above 0")
        with self._requests.changing() as session:
            commands.retire(session, self.name, node, within_s, self._clock())
            self._requests.record(session, ActionKind.ALTERED, f"node {node} ends within {within_s:g} s")
        reconciling.ensure_running()
        reconcile(self._store, self.name, clock=self._clock)

    def set_quota(self, team: str, *, max_nodes: int | None = None, node_hours: float | None = None) -> None:
        """Set the quota of a team: how many nodes and node-hours the team's leases may use. If both limits are None,
        remove the quota.

        A lease that would exceed `max_nodes` together with the team's other leases waits in the queue. A lease of a
        team that has used up `node_hours` is refused. Leases that are already granted are not affected.

        Args:
            team: Name of the team, as given in `team` when the leases are requested.
            max_nodes: Largest number of nodes that the team's leases may take together.
            node_hours: Node-hours that the team's leases may use within 30 days.

        Raises:
            InvalidArgumentError: The name is empty, or a limit is not allowed.
            PoolNotFoundError: No pool has this name.
        """
        if not isinstance(team, str) or not team.strip():
            raise InvalidArgumentError(f"team={shown(team)}: it has to be the name of a team, a text that is not blank")
        if max_nodes is not None:
            checked_size(max_nodes, "max_nodes")
        if node_hours is not None and not 0 < node_hours < math.inf:
            raise InvalidArgumentError(f"node_hours={shown(node_hours)}: it has to be a number above 0")
        with self._requests.changing() as session:
            pool = rows.load(session, self.name).pool
            before = usage.quota_text(pool, storable(team))
            usage.set_quota(pool, storable(team), max_nodes=max_nodes, node_hours=node_hours)
            after = usage.quota_text(pool, storable(team))
            self._requests.record(session, ActionKind.ALTERED, f"quota of team {team}: {before} -> {after}")
        if is_here(pool) and pool.state is PoolState.UP:
            reconciling.ensure_running()

    def usage(self, *, days: float = USAGE_DAYS) -> list[HolderUsage]:
        """Return the node-seconds that the leases and jobs of each holder have used, sorted from most to least.

        Args:
            days: Number of past days whose use is counted.

        Raises:
            PoolNotFoundError: No pool has this name.
        """
        if not days > 0:
            raise InvalidArgumentError(f"days={days}: it has to be a number of days above 0")
        now = self._clock()
        with self._store.reading() as session:
            rows.load(session, self.name, lock=False)
            return usage.by_holder(session, self.name, now, since=stamps.shared_now(session, now) - days * 24 * 3600)

    def endpoint(self, *, may_be_silent: bool = False) -> Endpoint:
        """Return the address at which the pool's head accepts jobs.

        Args:
            may_be_silent: Whether a head that does not answer now counts as ready, because it may be paused.

        Raises:
            PoolDownError: The pool is not up, its head is not ready, or the pool is bound to another machine.
        """
        snapshot = rows.read(self._store, self.name)
        rows.require_up(snapshot.pool)
        return head_endpoint(snapshot, may_be_silent=may_be_silent)

    def preflight(self, artifact_location: str | None = None) -> list[Finding]:
        """Check whether the nodes of a `ray://` or `kuberay://` pool have everything that jobs need, such as Python
        packages.

        The check runs a small job on the cluster, which takes some seconds.

        Args:
            artifact_location: URI or path at which the nodes must be able to read and write. None: not checked.

        Returns:
            The findings about the head and about one other node.

        Raises:
            InvalidArgumentError: The pool has another backend.
            PoolUnreachableError: The cluster does not answer, or cannot run the job.
        """
        return preflight.preflight(self.settings(), artifact_location)

    def check_nodes(self) -> list[Finding]:
        """Run :meth:`preflight`, unless an earlier run from this Python environment has found that jobs can run on this
        pool.

        Problems are logged as warnings. Pools with other backends than `ray://` and `kuberay://` are not checked, and
        neither is a cluster that does not answer.

        Returns:
            The findings with the status ``broken``: with these problems, no job can run on the pool.
        """
        spec = self.settings()
        return preflight.preflight_once(spec) if backend_of(spec).is_checked else []

    def settings(self) -> PoolSpec:
        """Return the settings of the pool, from the store if it has been started before."""
        with self._store.reading() as session:
            return self._requests.spec_to_start(session)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _limits(pool: Pool) -> str:
    return f"{pool.min_nodes} to {_nodes(pool.max_nodes)}"


_ASKED_AT_ONCE = 16
"""Largest number of pools whose status `report_pools` reads at the same time."""


def scale_cluster(
    expected_cluster_size: int | str,
    *,
    plan_for: Any = None,
    pool_name: str | None = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
    notebook_name: str | None = None,
) -> bool:
    """Grow or shrink a pool to a number of nodes, including the head.

    If the nodes are not ready at the deadline, or the call fails in any way, the previous demand is restored and all
    nodes that this operation started are ended.

    Args:
        expected_cluster_size: Number of nodes, from MIN_NODES to MAX_NODES of the pool; or "auto", with `plan_for`.
        plan_for: Spec of a boosting training, or its fields, for the size "auto": the smallest number of nodes is
            planned on which the training fits into the memory, from the data that the pool's head reads (see
            `shoal.plan`). Or a function that returns the number.
        pool_name: Name of the pool. Optional inside a job, if ``$SHOAL_POOL`` is set, or if only one pool is up.
        is_async: Return as soon as the request is written to the database. The reconciler (a background process on
            this host) then starts or ends the nodes.
        options: ``rollback_after_seconds`` is the time until the deadline (default: 720). With
            ``block_until_min_cluster_size``, the call returns as soon as this number of nodes is ready. The other nodes
            may still start until the deadline. Then the demand is set to the number of ready nodes.
        notebook_name: Alias of `pool_name` that accepts any text, such as ``'"MY_NOTEBOOK"'``, which names the pool
            ``my-notebook``; see `shoal.pool.spec.pool_name_of`.

    Returns:
        True when all nodes, or the minimum, are ready. With `is_async`: True when the request is accepted.

    Raises:
        InvalidArgumentError: The size or an option is invalid. Nothing was changed.
        PoolNotFoundError: No pool has this name. Nothing was changed.
        PoolDownError: The pool is down. Start it with `ComputePool.up`.
        ScaleError: The size was not reached, and the operation was rolled back. The error names each failed node.
    """
    from_notebook = pool_name_of(notebook_name) if notebook_name else None
    if pool_name and from_notebook and pool_name != from_notebook:
        raise InvalidArgumentError(
            f"pool_name={pool_name!r} and its alias notebook_name={notebook_name!r} (pool {from_notebook!r}) differ: "
            "pass only one of them"
        )
    # Check the arguments first, so that wrong ones are reported even if the store cannot be opened.
    if not is_auto(expected_cluster_size, plan_for):
        ScaleOptions.for_size(options, checked_size(expected_cluster_size))
    pool = ComputePool(pool_name or from_notebook)
    return pool.scale(expected_cluster_size, plan_for=plan_for, is_async=is_async, options=options)


def get_nodes(pool_name: str | None = None) -> list[NodeInfo]:
    """Return the nodes that are ready to work, the head first, as ``[{"name": …, "cpus": …, "gpus": …}, …]``.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    return ComputePool(pool_name).get_nodes()


def describe_pool(pool_name: str | None = None) -> PoolStatus:
    """Return a pool's current status: state, limits, target size, nodes, leases (granted and waiting) and last
    operation.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    return ComputePool(pool_name).describe()


def alter_pool(pool_name: str, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
    """Change a pool's MIN_NODES and MAX_NODES. The reconciler starts nodes if MIN_NODES was raised.

    Raises:
        PoolNotFoundError: No pool has this name.
        InvalidArgumentError: MIN_NODES is above MAX_NODES, or MAX_NODES is below the base demand, below the nodes that
            the granted leases take together, or below the size of a waiting lease.
    """
    ComputePool(pool_name).alter(min_nodes=min_nodes, max_nodes=max_nodes)


def list_pools(store: Store | None = None, *, embedded: bool = False) -> list[PoolStatus]:
    """Return the status of every pool in the store.

    Args:
        store: The state store.
        embedded: Whether to include embedded pools (pools that belong to a process or a job) that are not down.
    """
    return [report.status for report in report_pools(store, embedded=embedded)]


def report_pools(
    store: Store | None = None, *, embedded: bool = False, check: Callable[[Snapshot], Seen] = check_nodes
) -> list[PoolReport]:
    """Return the status and the operations of every pool in the store. The number of database queries does not depend
    on the number of pools.

    Args:
        store: The state store.
        embedded: Whether to include embedded pools (pools that belong to a process or a job) that are not down.
        check: Function that returns which nodes of a pool are lost. Default: ask the pool's head, which may take
            seconds.
    """
    with (store or Store()).reading() as session:
        snapshots = rows.load_all(session)
    listed = [each for each in snapshots if each.pool.owner is None or (embedded and each.pool.state != PoolState.DOWN)]
    now = time.time()
    # The head of a remote pool may take seconds to answer, so several pools are queried at the same time.
    with ThreadPoolExecutor(max(1, min(len(listed), _ASKED_AT_ONCE))) as threads:
        # The threads use the store of the caller (`shoal.state.home.use_store`).
        reports = [threads.submit(copy_context().run, report_of, each, now, check) for each in listed]
    return [each.result() for each in reports]


def sweep_nodes(store: Store) -> list[str]:
    """End the nodes on this host that no pool needs any more, and return one sentence for each action. The record of
    actions gets no line; see `shoal.jobs.sweep`."""
    did = sweep(store)
    if any(is_here(pool) for pool in store.scalars(select(Pool).where(Pool.state != PoolState.DOWN))):
        reconciling.ensure_running()
    return did
