"""Compute pools as their users see them: `ComputePool`, and the same as plain functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.errors import (
    InvalidArgumentError,
    PoolStoppingError,
    ScaleError,
    StoreError,
)
from shoal.pool import reconcile as _reconcile
from shoal.pool.backends import BACKENDS
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import is_here, python_holder
from shoal.pool.journal import commands, rows
from shoal.pool.journal.operations import withdraw
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.pool.leases import PoolLease
from shoal.pool.plan import Snapshot
from shoal.pool.reconcile import Clock
from shoal.pool.reconciler import ensure_running
from shoal.pool.resolve import which_pool
from shoal.pool.spec import PoolSpec, ScaleOptions, checked_size, is_uri
from shoal.pool.status import NodeInfo, PoolStatus, head_endpoint, status_of
from shoal.pool.tunables import LEASE_TTL, ROLLBACK_AFTER, WAIT_PERIOD
from shoal.pool.waiting import OnProgress, Waiting
from shoal.state import Store
from shoal.state.codec import storable
from shoal.state.process import ProcessId
from shoal.state.schema import Lease, Operation, OperationState, Pool, PoolState


class ComputePool:
    """A compute pool: a named set of nodes that can be scaled.

    Args:
        source: A URI (``local://retrain?max_nodes=4``), a `PoolSpec`, or the name of a pool that exists; by default
            the one that the rule of `shoal.pool.resolve` names.
        holder: Who asks; by default this Python process.
        store: The state store; by default ``$SHOAL_STATE_URL``, else SQLite in ``$SHOAL_HOME``.
        clock: Seconds since the epoch; tests put hours into milliseconds with it.

    Raises:
        InvalidArgumentError: The URI or spec is wrong, or no pool was named where there is none or more than one.
        PoolNotFoundError: There is no pool of that name.

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
        store: Store | None = None,
        clock: Clock = time.time,
    ) -> None:
        self._spec = PoolSpec.parse(source) if isinstance(source, PoolSpec) or (source and is_uri(source)) else None
        self._store = store or Store()
        self._clock = clock
        self.name = (
            self._spec.name if self._spec else which_pool(self._store, source if isinstance(source, str) else None)
        )
        self.holder = storable(holder or python_holder())

    def __repr__(self) -> str:
        return f"ComputePool({self.name!r})"

    def up(
        self,
        *,
        rollback_after_seconds: float = ROLLBACK_AFTER,
        on_progress: OnProgress | None = None,
        owner: ProcessId | None = None,
    ) -> ComputePool:
        """Bring the pool up with MIN_NODES and wait until they are ready. Up already: wait for the same.

        Args:
            rollback_after_seconds: Deadline, after which everything is ended again.
            on_progress: Called while waiting.
            owner: A process that the pool is embedded in: it goes when that process goes.

        Returns:
            The pool itself.

        Raises:
            ScaleError: Its nodes did not come up; nothing of them is left.
            InvalidArgumentError: It is up with other settings.
        """
        if not rollback_after_seconds > 0:
            raise InvalidArgumentError(f"rollback_after_seconds={rollback_after_seconds}: it has to be above 0")
        self._admit(1, bring_up=True)

        def request(session: Session) -> str:
            spec = self._definition(session)
            operation_id, begins = commands.up(
                session,
                spec,
                holder=self.holder,
                rollback_after=rollback_after_seconds,
                owner=owner.to_json() if owner else None,
                now=self._clock(),
            )
            if begins:  # in the transaction: no node may start without it
                BACKENDS[spec.backend]().prepare(spec)
            return operation_id

        self._carry_out(request, on_progress=on_progress)
        return self

    def down(self, *, abandon: bool = False, on_progress: OnProgress | None = None) -> None:
        """End every node and wait until nothing of them is left. Its jobs end with it; down already: nothing happens.

        Args:
            abandon: Do not tell the foreign cluster of a `ray://` pool, because it never answers again. What its
                autoscaler was asked for stays asked for, should it come back.
            on_progress: Called now and then.

        Raises:
            ScaleError: Some node could not be ended; the message says which processes are left.
            InvalidArgumentError: A local pool cannot be abandoned.
        """
        with transaction(self._store, JournalStep.REQUEST) as session:
            if abandon:
                return commands.abandon(session, self.name, self._clock())
            commands.down(session, self.name, self._clock())
        ensure_running()
        self._waiting.until_down(on_progress)

    def delete(self, *, abandon: bool = False, on_progress: OnProgress | None = None) -> None:
        """Take the pool down and remove it from the store, with its token and logs. Its jobs stay listed.

        Args:
            abandon: Remove a pool whose host, or whose foreign cluster, never returns. Should the host return after
                all, its nodes end themselves.
            on_progress: Called now and then.

        Raises:
            PoolElsewhereError: It is bound to another host; `abandon` removes it where that host never returns.
            ScaleError: Some node could not be ended; the message says which processes are left.
            InvalidArgumentError: It is to be abandoned, but bound to this host.
        """
        if not abandon:
            self.down(on_progress=on_progress)
        with transaction(self._store, JournalStep.TIDY) as session:
            backend = BACKENDS[PoolSpec.model_validate(rows.load(session, self.name).pool.spec).backend]()
            commands.remove(session, self.name, abandon=abandon)
            backend.discard(self.name, everything=True)

    def scale(
        self,
        expected_cluster_size: int,
        *,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> bool:
        """Set the pool's base demand; see `scale_cluster`."""
        size = checked_size(expected_cluster_size)
        parsed = ScaleOptions.for_size(options, size)
        self._admit(size)

        def request(session: Session) -> str:
            return commands.scale(
                session,
                self.name,
                size,
                holder=self.holder,
                rollback_after=parsed.rollback_after_seconds,
                block_until_min_cluster_size=parsed.block_until_min_cluster_size,
                now=self._clock(),
            )

        self._carry_out(
            request,
            block_until_min_cluster_size=parsed.block_until_min_cluster_size,
            is_async=is_async,
            on_progress=on_progress,
        )
        return True

    def lease(
        self,
        size: int,
        *,
        ttl: float = LEASE_TTL,
        bring_up: bool = False,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> PoolLease:
        """Claim nodes for this holder, beside the base demand and other holders' claims: the largest wins.

        A holder has one lease on a pool; asking again renews it at the new size. Past the deadline the lease is taken
        back, and the pool with it.

        Args:
            size: Nodes, the head among them.
            ttl: Seconds that it lives without being renewed.
            bring_up: Where the pool is down, bring it up: it goes down again with its last lease and job, unless
                somebody sets a base demand meanwhile. Says nothing about a pool that is up.
            is_async: Return as soon as the claim is journaled.
            options: As of `scale_cluster`.
            on_progress: Called while waiting.

        Returns:
            The lease; as a context manager it is renewed meanwhile and released at the end, come what may.

        Raises:
            InvalidArgumentError: A size above MAX_NODES, a wrong option.
            PoolDownError: The pool is not up, and was not to be brought up.
            ScaleError: The nodes did not come; the claim was taken back.

        Example:
            >>> with pool.lease(3):
            ...     estimator.fit(...)
        """
        size = checked_size(size, "size")
        parsed = ScaleOptions.for_size(options, size)
        if not ttl > 0:
            raise InvalidArgumentError(f"ttl={ttl}: it has to be above 0")
        self._admit(size, bring_up=bring_up)
        leases: list[Lease] = []

        def request(session: Session) -> str:
            spec = self._definition(session) if bring_up else None
            begins = spec is not None and commands.begin_life(session, spec, now=self._clock())
            operation_id, lease = commands.lease(
                session,
                self.name,
                size,
                holder=self.holder,
                ttl=ttl,
                rollback_after=parsed.rollback_after_seconds,
                block_until_min_cluster_size=parsed.block_until_min_cluster_size,
                now=self._clock(),
            )
            leases.append(lease)
            if spec and begins:  # in the transaction: no node may start without it
                BACKENDS[spec.backend]().prepare(spec)
            return operation_id

        self._carry_out(
            request,
            block_until_min_cluster_size=parsed.block_until_min_cluster_size,
            is_async=is_async,
            on_progress=on_progress,
        )
        return PoolLease(self._store, leases[0].id, leases[0].epoch, ttl, self.release, clock=self._clock)

    def release(self) -> bool:
        """Give up what this holder claims; False where it claims nothing. Its nodes go unless others need them.

        A pool that was brought up by a lease, and that nobody else wants anything of, is down afterwards. The nodes of
        one that is bound to another host go when that host's reconciler sees the lease gone, which is not waited for.
        """
        with transaction(self._store, JournalStep.REQUEST) as session:
            released = commands.release(session, self.name, self.holder, self._clock())
            here = is_here(session.get_one(Pool, self.name))
        if not here:
            return released > 0
        _reconcile.reconcile(self._store, self.name, clock=self._clock)
        ensure_running()
        self._waiting.until_down()
        return released > 0

    def renew(self) -> bool:
        """Hold on to what this holder claims, for another time to live; False where it claims nothing any more."""
        with transaction(self._store, JournalStep.REQUEST) as session:
            return commands.renew_held(session, self.name, self.holder, self._clock())

    def alter(self, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
        """Change the pool's limits; see `alter_pool`."""
        for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
            if value is not None:
                checked_size(value, name)
        self._admit(min_nodes or 1)
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.alter(session, self.name, min_nodes=min_nodes, max_nodes=max_nodes, now=self._clock())
        ensure_running()

    def get_nodes(self) -> list[NodeInfo]:
        """The active nodes, the head first; empty while the pool is down."""
        return [NodeInfo(name=node.name, cpus=node.cpus, gpus=node.gpus) for node in self.describe().active]

    def has_nodes(self, size: int) -> bool:
        """Whether so many nodes are active.

        Raises:
            ScaleError: They are not, and nobody asks for them (any more): it says what became of who did.
        """
        status = self.describe()
        if len(status.active) >= size:
            return True
        if status.target >= size:
            return False
        mine = self._last_rolled_back()
        if mine:
            why = f"what {self.holder} asked for was rolled back: {mine.error}"
        elif status.state != PoolState.UP.value:
            why = f"it is {status.state}"
        else:
            why = status.reason or "ask for them with a lease or scale_cluster"
        raise ScaleError(
            f'pool "{self.name}" has {len(status.active)} of {size} nodes and is to have {status.target}: {why}',
            mine.node_errors if mine else None,
        )

    def wait_for_nodes(
        self, size: int, *, timeout: float = ROLLBACK_AFTER, on_progress: OnProgress | None = None
    ) -> list[NodeInfo]:
        """Wait until so many nodes are active; asks for none itself.

        Args:
            size: Nodes, the head among them.
            timeout: Seconds to wait.
            on_progress: Called while waiting.

        Returns:
            The active nodes, the head first.

        Raises:
            ScaleError: Nobody asks for so many (any more), or the time is over.
        """
        until = time.monotonic() + timeout
        while not self.has_nodes(size):
            status = self.describe()
            if on_progress:
                on_progress(status)
            if time.monotonic() > until:
                raise ScaleError(
                    f'pool "{self.name}" has {len(status.active)} of {size} nodes after {timeout:g} s',
                    {node.name: node.error or node.state for node in (*status.pending, *status.failed)},
                )
            time.sleep(WAIT_PERIOD)
        return self.get_nodes()

    def describe(self) -> PoolStatus:
        """The pool as it stands. Reading never scales."""
        return status_of(self._snapshot(), self._clock())

    def endpoint(self) -> Endpoint:
        """Where the pool's head takes jobs.

        Raises:
            PoolDownError: It is not up, has no head that is ready, or is bound to another machine.
        """
        snapshot = self._snapshot()
        rows.require_up(snapshot.pool)
        return head_endpoint(snapshot)

    def sweep(self) -> list[str]:
        """End what nobody owns on this host, this pool or another; returns what was done."""
        return _reconcile.sweep(self._store, clock=self._clock)

    def _carry_out(
        self,
        request: Callable[[Session], str],
        *,
        block_until_min_cluster_size: int | None = None,
        is_async: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Journal an operation and wait for it; whatever interrupts that, from its first row on, rolls it back.

        Raises:
            ScaleError: It failed, or a newer one took its place.
        """
        operation_id = ""
        try:
            while not operation_id:
                try:
                    with transaction(self._store, JournalStep.REQUEST) as session:
                        operation_id = request(session)
                        operation = session.get_one(Operation, operation_id)
                except PoolStoppingError:  # as another run ends, this one begins
                    operation_id = ""
                    self._waiting.until_down(on_progress)
            ensure_running()
            if not is_async:
                patience = operation.deadline - operation.created_at
                self._waiting.for_operation(
                    operation_id,
                    patience,
                    block_until_min_cluster_size=block_until_min_cluster_size,
                    on_progress=on_progress,
                )
        except BaseException as error:
            if operation_id:
                try:
                    self._give_up(operation_id)
                except StoreError:
                    error.add_note(f"Operation {operation_id} could not be rolled back: `shoal sweep` sees to its end")
            raise

    def _give_up(self, operation_id: str) -> None:
        with transaction(self._store, JournalStep.WITHDRAW) as session:
            withdrawn = withdraw(session, operation_id, "its caller was interrupted", self._clock())
        if withdrawn:
            self._waiting.until_settled()

    def _snapshot(self) -> Snapshot:
        with self._store.reading() as session:
            return rows.load(session, self.name, lock=False)

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self._store, self.name, self._clock)

    def _definition(self, session: Session) -> PoolSpec:
        """What the pool is to be where it is brought up: as given, else as it was."""
        return self._spec or PoolSpec.model_validate(rows.load(session, self.name).pool.spec)

    def _admit(self, size: int, *, bring_up: bool = False) -> None:
        """Have the backend refuse what it can never do; everything that the journal refuses is left to it."""
        with self._store.reading() as session:
            pool = session.get(Pool, self.name)
            up = pool is not None and pool.state is PoolState.UP
            if not (up or bring_up):
                return
            spec = PoolSpec.model_validate(pool.spec) if pool and up else self._definition(session)
        if (wanted := max(size, spec.min_nodes)) <= spec.max_nodes:
            BACKENDS[spec.backend]().admit(spec, wanted)

    def _last_rolled_back(self) -> Operation | None:
        """This holder's last operation, if it was rolled back."""
        with self._store.reading() as session:
            last = session.scalars(
                select(Operation)
                .where(Operation.pool == self.name, Operation.holder == self.holder)
                .order_by(Operation.created_at.desc())
            ).first()
        return last if last and last.state is OperationState.ROLLED_BACK else None


def scale_cluster(
    expected_cluster_size: int,
    *,
    pool_name: str | None = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
    notebook_name: str | None = None,
) -> bool:
    """Grow or shrink a pool to a number of nodes, the head among them.

    Past the deadline, or on any failure, the demand is withdrawn and the one before it restored; nothing that the
    operation started is left.

    Args:
        expected_cluster_size: Nodes, from MIN_NODES to MAX_NODES of the pool.
        pool_name: Which pool; may be left out inside a job, with ``$SHOAL_POOL``, or where there is only one.
        is_async: Return as soon as the request is journaled; the reconciler carries it out.
        options: ``rollback_after_seconds`` (720) and ``block_until_min_cluster_size`` (return at that many ready nodes;
            the rest keep coming until the deadline, then the pool settles at what it has).
        notebook_name: Alias of `pool_name`.

    Returns:
        True when all nodes (or the minimum) are ready; with `is_async` when the request is accepted.

    Raises:
        InvalidArgumentError: A wrong size or option; nothing happened.
        PoolNotFoundError: There is no such pool; nothing happened.
        PoolDownError: The pool is down: only `up()` starts it.
        ScaleError: The size was not reached, node by node why; rolled back.
    """
    if pool_name and notebook_name and pool_name != notebook_name:
        raise InvalidArgumentError(f"pool_name={pool_name!r} and its alias notebook_name={notebook_name!r} differ")
    size = checked_size(expected_cluster_size)
    ScaleOptions.for_size(options, size)  # before the store is even opened
    return ComputePool(pool_name or notebook_name).scale(size, is_async=is_async, options=options)


def get_nodes(pool_name: str | None = None) -> list[NodeInfo]:
    """The active nodes of a pool, the head first: ``[{"name": …, "cpus": …, "gpus": …}, …]``.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    return ComputePool(pool_name).get_nodes()


def describe_pool(pool_name: str | None = None) -> PoolStatus:
    """A pool as it stands: state, limits, target, nodes, leases, last operation.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    return ComputePool(pool_name).describe()


def alter_pool(pool_name: str, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
    """Change a pool's limits; a raised MIN_NODES is reached by the reconciler.

    Raises:
        PoolNotFoundError: There is no such pool.
        InvalidArgumentError: The limits contradict each other, or what is asked of the pool.
    """
    ComputePool(pool_name).alter(min_nodes=min_nodes, max_nodes=max_nodes)


def list_pools(store: Store | None = None) -> list[PoolStatus]:
    """Every pool of this store."""
    store = store or Store()
    with store.reading() as session:
        names = rows.pool_names(session)
    return [ComputePool(name, store=store).describe() for name in names]


def sweep(store: Store | None = None) -> list[str]:
    """End what nobody owns on this host; safe at any time. Returns what was done, a sentence each."""
    store = store or Store()
    did = _reconcile.sweep(store)
    with store.reading() as session:
        alive = any(is_here(pool) for pool in session.scalars(select(Pool).where(Pool.state != PoolState.DOWN)))
    if alive:
        ensure_running()
    return did
