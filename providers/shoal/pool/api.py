"""Compute pools as their users see them: `ComputePool`, and the same as plain functions."""

from __future__ import annotations

import difflib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, PoolDownError, ScaleError
from shoal.pool import journal
from shoal.pool import reconcile as _reconcile
from shoal.pool.backends.local import log_path, token_path
from shoal.pool.holder import host, python_holder
from shoal.pool.leases import PoolLease
from shoal.pool.plan import Snapshot, wanted
from shoal.pool.processes import ProcessId
from shoal.pool.reconciler import ensure_running
from shoal.pool.spec import PoolSpec, is_uri
from shoal.pool.status import Endpoint, LeaseStatus, NodeInfo, NodeStatus, OperationStatus, PoolStatus
from shoal.pool.tunables import DOWN_PATIENCE, LEASE_TTL, ROLLBACK_AFTER, WAIT_PERIOD
from shoal.pool.which import which_pool
from shoal.state import Store
from shoal.state.schema import Lease, Node, NodeState, Operation, OperationKind, OperationState, Pool, PoolState

OnProgress = Callable[[PoolStatus], None]
"""Called now and then while something is waited for."""


class ScaleOptions(BaseModel):
    """The `options` of `scale_cluster`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rollback_after_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = ROLLBACK_AFTER
    block_until_min_cluster_size: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, size: int) -> ScaleOptions:
        """Check options before anything starts.

        Raises:
            InvalidArgumentError: An unknown option, or a value out of range, by name.
        """
        try:
            parsed = cls.model_validate(dict(options or {}))
        except ValidationError as error:
            raise InvalidArgumentError("; ".join(cls._say(problem) for problem in error.errors())) from None
        least = parsed.block_until_min_cluster_size
        if least is not None and least > size:
            raise InvalidArgumentError(
                f"block_until_min_cluster_size={least} is above expected_cluster_size={size}: it can be {size} at most"
            )
        return parsed

    @classmethod
    def _say(cls, problem: Any) -> str:
        name = str(problem["loc"][0])
        if problem["type"] != "extra_forbidden":
            return f"option {name}={problem['input']!r}: {problem['msg']}"
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f'unknown option "{name}"' + (
            f": did you mean {near[0]}?" if near else f"; there are: {', '.join(cls.model_fields)}"
        )


class ComputePool:
    """A compute pool: a named set of nodes that can be scaled.

    Args:
        source: A URI (``local://retrain?max_nodes=4``), a `PoolSpec`, or the name of a pool that exists; by default
            the one that the rule of `shoal.pool.which` names.
        holder: Who asks; by default this Python process.
        store: The state store; by default ``$SHOAL_STATE_URL``, else SQLite in ``$SHOAL_HOME``.

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
        self, source: str | PoolSpec | None = None, *, holder: str | None = None, store: Store | None = None
    ) -> None:
        self._spec = PoolSpec.parse(source) if isinstance(source, PoolSpec) or (source and is_uri(source)) else None
        self._store = store or Store()
        self.name = (
            self._spec.name if self._spec else which_pool(self._store, source if isinstance(source, str) else None)
        )
        self.holder = holder or python_holder()

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

        def request(session: Session) -> str:
            spec = self._spec or PoolSpec.model_validate(journal.load(session, self.name).pool.spec)
            operation_id, begins = journal.request_up(
                session,
                spec,
                holder=self.holder,
                rollback_after=rollback_after_seconds,
                owner=owner.to_json() if owner else None,
                now=time.time(),
            )
            if begins:  # in the transaction: no node may start without it
                _write_token(self.name)
            return operation_id

        self._carry_out(request, on_progress=on_progress)
        return self

    def down(self, *, on_progress: OnProgress | None = None) -> None:
        """End every node and wait until nothing of them is left. Its jobs end with it; down already: nothing happens.

        Raises:
            ScaleError: Some node could not be ended; the message says which processes are left.
        """
        with self._store.transaction() as session:
            journal.request_down(session, self.name, time.time())
        ensure_running()
        until = time.monotonic() + DOWN_PATIENCE
        while True:
            _reconcile.reconcile(self._store, self.name)
            status = self.describe()
            if status.state != PoolState.STOPPING.value:
                return
            if on_progress:
                on_progress(status)
            if time.monotonic() > until:
                raise ScaleError(
                    f'pool "{self.name}" is not down after {DOWN_PATIENCE:.0f} s; `shoal sweep` tries again',
                    {node.name: node.error or node.state for node in status.leaving},
                )
            time.sleep(WAIT_PERIOD)

    def scale(
        self,
        expected_cluster_size: int,
        *,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> bool:
        """Set the pool's base demand; see `scale_cluster`."""
        size = _checked_size(expected_cluster_size)
        parsed = ScaleOptions.parse(options, size)

        def request(session: Session) -> str:
            return journal.request_scale(
                session,
                self.name,
                size,
                holder=self.holder,
                rollback_after=parsed.rollback_after_seconds,
                min_size=parsed.block_until_min_cluster_size,
                now=time.time(),
            )

        self._carry_out(request, least=parsed.block_until_min_cluster_size, is_async=is_async, on_progress=on_progress)
        return True

    def lease(
        self,
        size: int,
        *,
        ttl: float = LEASE_TTL,
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
            is_async: Return as soon as the claim is journaled.
            options: As of `scale_cluster`.
            on_progress: Called while waiting.

        Returns:
            The lease; as a context manager it is renewed meanwhile and released at the end, come what may.

        Raises:
            InvalidArgumentError: A size above MAX_NODES, a wrong option.
            PoolDownError: The pool is not up.
            ScaleError: The nodes did not come; the claim was taken back.

        Example:
            >>> with pool.lease(3):
            ...     estimator.fit(...)
        """
        size = _checked_size(size, "size")
        parsed = ScaleOptions.parse(options, size)
        if not ttl > 0:
            raise InvalidArgumentError(f"ttl={ttl}: it has to be above 0")
        leases: list[Lease] = []

        def request(session: Session) -> str:
            operation_id, lease = journal.request_lease(
                session,
                self.name,
                size,
                holder=self.holder,
                ttl=ttl,
                rollback_after=parsed.rollback_after_seconds,
                min_size=parsed.block_until_min_cluster_size,
                now=time.time(),
            )
            leases.append(lease)
            return operation_id

        self._carry_out(request, least=parsed.block_until_min_cluster_size, is_async=is_async, on_progress=on_progress)
        return PoolLease(self._store, leases[0].id, leases[0].epoch, self.name, self.holder, ttl)

    def release(self) -> bool:
        """Give up what this holder claims; False where it claims nothing. Its nodes go unless others need them."""
        with self._store.transaction() as session:
            released = journal.release_leases(session, self.name, self.holder, time.time())
        _reconcile.reconcile(self._store, self.name)
        ensure_running()
        return released > 0

    def renew(self, ttl: float = LEASE_TTL) -> bool:
        """Hold on to what this holder claims, for another `ttl` seconds; False where it claims nothing any more."""
        with self._store.transaction() as session:
            leases = journal.load(session, self.name).leases
            mine = next((lease for lease in leases if lease.holder == self.holder), None)
            if mine is None or mine.expires_at <= time.time():
                return False
            journal.renew_lease(session, mine.id, mine.epoch, ttl, time.time())
        return True

    def alter(self, *, min_nodes: int | None = None, max_nodes: int | None = None) -> None:
        """Change the pool's limits; see `alter_pool`."""
        for name, value in (("min_nodes", min_nodes), ("max_nodes", max_nodes)):
            if value is not None:
                _checked_size(value, name)
        with self._store.transaction() as session:
            journal.request_alter(session, self.name, min_nodes=min_nodes, max_nodes=max_nodes, now=time.time())
        ensure_running()

    def get_nodes(self) -> list[NodeInfo]:
        """The active nodes, the head first; empty while the pool is down."""
        return [NodeInfo(name=node.name, cpus=node.cpus, gpus=node.gpus) for node in self.describe().active]

    def describe(self) -> PoolStatus:
        """The pool as it stands. Reading never scales."""
        with self._store.reading() as session:
            snapshot = journal.load(session, self.name, lock=False)
        now = time.time()
        pool = snapshot.pool
        nodes = [(node, _state_seen(node, pool)) for node in snapshot.nodes]
        last = snapshot.operations[-1] if snapshot.operations else None

        def those(*states: NodeState) -> tuple[NodeStatus, ...]:
            chosen = [_node_status(node, state) for node, state in nodes if state in states]
            return tuple(sorted(chosen, key=lambda node: not node.is_head))

        return PoolStatus(
            name=pool.name,
            uri=PoolSpec.model_validate(pool.spec).uri,
            state=pool.state.value,
            host=pool.host,
            min_nodes=pool.min_nodes,
            max_nodes=pool.max_nodes,
            target=wanted(pool, snapshot.demand, snapshot.leases, now),
            active=those(NodeState.READY),
            pending=those(NodeState.PLANNED, NodeState.STARTING),
            failed=those(NodeState.FAILED),
            leaving=those(NodeState.DRAINING, NodeState.ENDING),
            leases=tuple(
                LeaseStatus(lease.id, lease.holder, lease.size, lease.expires_at)
                for lease in snapshot.leases
                if lease.expires_at > now
            ),
            last_operation=_operation_status(last) if last else None,
            reason=_reason(snapshot, now),
        )

    def endpoint(self) -> Endpoint:
        """Where the pool's head takes jobs.

        Raises:
            PoolDownError: It is not up, has no head that is ready, or is bound to another machine.
        """
        with self._store.reading() as session:
            snapshot = journal.load(session, self.name, lock=False)
        journal.require_up(snapshot.pool)
        for node in snapshot.nodes:
            if node.is_head and _state_seen(node, snapshot.pool) is NodeState.READY and node.endpoint:
                return Endpoint(node.endpoint["api"], node.endpoint["gcs"], token_path(self.name))
        raise PoolDownError(f'the head of pool "{self.name}" is not ready: `shoal pool describe {self.name}` says why')

    def sweep(self) -> list[str]:
        """End what nobody owns on this host, this pool or another; returns what was done."""
        return _reconcile.sweep(self._store)

    def _carry_out(
        self,
        request: Callable[[Session], str],
        *,
        least: int | None = None,
        is_async: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Journal an operation and wait for it; whatever interrupts that, from its first row on, rolls it back.

        Raises:
            ScaleError: It failed, or a newer one took its place.
        """
        operation_id = ""
        try:
            with self._store.transaction() as session:
                operation_id = request(session)
            ensure_running()
            if not is_async:
                self._wait(operation_id, least=least, on_progress=on_progress)
        except BaseException:
            if operation_id:
                self._give_up(operation_id)
            raise

    def _wait(self, operation_id: str, *, least: int | None, on_progress: OnProgress | None) -> None:
        while True:
            _reconcile.reconcile(self._store, self.name)
            operation = self._operation(operation_id)
            if operation.state is not OperationState.OPEN:
                break
            status = self.describe()
            if least is not None and len(status.active) >= least:
                return
            if on_progress:
                on_progress(status)
            time.sleep(WAIT_PERIOD)
        if operation.state is OperationState.SUCCEEDED:
            return
        if operation.state is OperationState.ROLLED_BACK:
            self._settle()
        back = "" if operation.state is OperationState.SUPERSEDED else _rolled_back_to(operation)
        raise ScaleError(
            f'pool "{self.name}" did not reach {operation.size} nodes: {operation.error}{back}', operation.node_errors
        )

    def _give_up(self, operation_id: str) -> None:
        with self._store.transaction() as session:
            withdrawn = journal.withdraw(session, operation_id, "its caller was interrupted", time.time())
        if withdrawn:
            self._settle()

    def _settle(self) -> None:
        """After a rollback: see the nodes gone that it started, so that nothing is left when the caller goes on."""
        until = time.monotonic() + DOWN_PATIENCE
        while time.monotonic() < until:
            _reconcile.reconcile(self._store, self.name)
            status = self.describe()
            if not status.failed and not status.leaving and len(status.active) + len(status.pending) <= status.target:
                return
            time.sleep(WAIT_PERIOD)

    def _operation(self, operation_id: str) -> Operation:
        with self._store.reading() as session:
            return session.get_one(Operation, operation_id)


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
    size = _checked_size(expected_cluster_size)
    ScaleOptions.parse(options, size)  # before the store is even opened
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
        names = journal.pool_names(session)
    return [ComputePool(name, store=store).describe() for name in names]


def sweep(store: Store | None = None) -> list[str]:
    """End what nobody owns on this host; safe at any time. Returns what was done, a sentence each."""
    store = store or Store()
    did = _reconcile.sweep(store)
    with store.reading() as session:
        alive = session.scalars(select(Pool).where(Pool.state != PoolState.DOWN, Pool.host == host())).first()
    if alive:
        ensure_running()
    return did


def _checked_size(value: Any, name: str = "expected_cluster_size") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r}: it has to be a whole number of nodes, 1 or more")
    return value


def _write_token(pool: str) -> None:
    path = token_path(pool)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def _state_seen(node: Node, pool: Pool) -> NodeState:
    """A node's state, with a supervisor of this host looked at: what died a moment ago is not active."""
    live = node.state in (NodeState.STARTING, NodeState.READY, NodeState.DRAINING)
    if live and pool.host == host() and node.supervisor and not ProcessId.from_json(node.supervisor).alive():
        return NodeState.FAILED
    return node.state


def _node_status(node: Node, state: NodeState) -> NodeStatus:
    return NodeStatus(
        name=node.name,
        state=state.value,
        is_head=node.is_head,
        cpus=node.cpus,
        gpus=node.gpus,
        busy=node.busy,
        error=node.error,
        log=str(log_path(node.pool, node.name)),
    )


def _operation_status(row: Operation) -> OperationStatus:
    return OperationStatus(
        id=row.id,
        kind=row.kind.value,
        state=row.state.value,
        holder=row.holder,
        size=row.size,
        created_at=row.created_at,
        deadline=row.deadline,
        ended_at=row.ended_at,
        error=row.error,
    )


def _reason(snapshot: Snapshot, now: float) -> str | None:
    pool, last = snapshot.pool, snapshot.operations[-1] if snapshot.operations else None
    if pool.state is not PoolState.UP:
        return None
    short = len(snapshot.nodes) < wanted(pool, snapshot.demand, snapshot.leases, now)
    if short and pool.cooldown_until and pool.cooldown_until > now:
        return f"a node failed to start; the next try is in {pool.cooldown_until - now:.0f} s"
    if last and last.state is OperationState.ROLLED_BACK:
        return f"the last operation was rolled back: {last.error}"
    return None


def _rolled_back_to(operation: Operation) -> str:
    if operation.kind is OperationKind.LEASE:
        return "; its lease was taken back"
    if operation.replaced_size is None:
        return "; everything it had started was ended"
    return f"; rolled back to {operation.replaced_size}"
