"""Write a pool's operations into the store, and wait until they have ended. The waiting process itself reconciles the
pool (starts and ends its nodes), so it does not depend on the background reconciler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal import errors, history, telemetry
from shoal.os_processes import ProcessId
from shoal.own_pauses import waited_since
from shoal.pool import bound_host, reconciling
from shoal.pool.backends import backend_of
from shoal.pool.bound_host import is_here
from shoal.pool.holder import definer_of, job_of, python_holder, require_team
from shoal.pool.journal import commands, rows, sizes
from shoal.pool.journal.advance import withdraw
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.pool.reconciling import Clock, is_abandoned, owner_has_ended, reconcile
from shoal.pool.scaling_plan import lease_of, nodes_for
from shoal.pool.selection import is_embedded
from shoal.pool.spec import PoolSpec
from shoal.pool.status import PoolStatus, status_of
from shoal.pool.timeouts import DOWN_PATIENCE, STORE_PERIOD, TURN_PATIENCE, WAIT_PERIOD, WAIT_PERIOD_MOST
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.home import lock_file
from shoal.state.schema import ActionKind, Lease, Operation, OperationKind, OperationState, Pool, PoolState

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

    def for_operation(self, operation_id: str, patience: float, on_progress: OnProgress | None) -> None:
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
        if operation.state is OperationState.SUPERSEDED:
            back = ""
        elif operation.replaced_size is not None:
            back = f"; rolled back to {operation.replaced_size}"
        else:
            is_lease = operation.kind is OperationKind.LEASE
            back = "; the lease was removed" if is_lease else "; all nodes that it had started were ended"
        raise errors.ScaleError(
            f'pool "{self._name}" did not reach {operation.size} nodes: {operation.error}{back}', operation.node_errors
        )

    def _wait_for_end(self, operation_id: str, patience: float, on_progress: OnProgress | None) -> Operation | None:
        """Wait until an operation ends, and return the operation. Return None as soon as the operation's
        `block_until_min_cluster_size` nodes are ready, if this happens earlier."""
        began = time.monotonic()
        with closing(self._turn):
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
                except errors.StoreUnreachableError as error:
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
        with closing(self._turn), suppress(errors.PoolNotFoundError):
            while (status := self._status()).state == PoolState.STOPPING.value:
                self._reconcile()
                if on_progress:
                    on_progress(status)
                if waited_since(began) > DOWN_PATIENCE:
                    why = f": {status.reason}" if status.reason else ""
                    raise errors.ScaleError(
                        f'pool "{self._name}" is not down after {DOWN_PATIENCE:.0f} s{why}; run `shoal sweep` to try '
                        "again",
                        {node.name: node.error or node.state for node in status.leaving},
                    )
                pause(began)

    def until_settled(self) -> None:
        """Wait after a rollback until no surplus or failed node is left, or DOWN_PATIENCE seconds have passed."""
        began = time.monotonic()
        with closing(self._turn):
            while waited_since(began) < DOWN_PATIENCE:
                self._reconcile()
                status = self._status()
                stopping = status.state == PoolState.STOPPING.value
                left = status.failed or status.leaving or len(status.active) + len(status.pending) > status.target
                if not left and not stopping:
                    return
                pause(began)

    def _reconcile(self) -> None:
        if self._turn.take():
            reconcile(self._store, self._name, clock=self._clock)

    def _status(self) -> PoolStatus:
        return status_of(rows.read(self._store, self._name), self._clock())

    def _progress(self, operation: Operation) -> tuple[PoolStatus, int]:
        """Return the pool's status, and the number of ready nodes that an operation may use. The operation of a lease
        cannot use the nodes that earlier leases take."""
        snapshot = rows.read(self._store, self._name)
        status = status_of(snapshot, self._clock())
        return status, nodes_for(snapshot, lease_of(snapshot, operation), len(status.active))


def end_if_abandoned(store: Store, name: str) -> None:
    """End an embedded pool whose process has ended, with the pool's jobs, and wait until nothing of it is left. Do
    nothing to any other pool.

    The reconciler does the same, but it may be killed together with the process, or a moment later.

    Raises:
        ScaleError: A node could not be ended. The message names the remaining processes.
    """
    if not is_embedded(store, name):
        return
    with suppress(errors.PoolNotFoundError):
        snapshot = rows.read(store, name)
        if owner_has_ended(snapshot.pool) and (snapshot.pool.state is not PoolState.UP or is_abandoned(snapshot)):
            reconcile(store, name)
            Waiting(store, name, time.time).until_down()
            reconcile(store, name)


def bounded_pause(wanted_s: float) -> float:
    """Return the seconds to pause before the store is read again: `wanted_s`, but at least WAIT_PERIOD and at most
    WAIT_PERIOD_MOST."""
    return min(max(WAIT_PERIOD, wanted_s), WAIT_PERIOD_MOST)


def pause(began: float) -> None:
    """Sleep for a tenth of the time waited so far; see `bounded_pause`."""
    time.sleep(bounded_pause((time.monotonic() - began) / 10))


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
        try:
            age = time.time() - self._path.stat().st_mtime
        except OSError:
            age = TURN_PATIENCE
        # The file contains the id of the process that has the turn. If the file's age is negative, the clock was set
        # back. This process then takes the turn.
        if not self._is_mine() and 0 <= age < TURN_PATIENCE:
            return False
        # If the disk is full, the file cannot be written, and each waiting process reconciles the pool. This is safe.
        with suppress(OSError):
            self._path.write_text(self._me)
        return True

    def close(self) -> None:
        """Give up the turn by removing the file that records this process's turn. Another process can then take the
        turn at once."""
        if self._is_mine():
            self._path.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        try:
            return self._path.read_text() == self._me
        except OSError:
            return False


@dataclass
class Requests:
    """The requests of one holder to one pool. `spec` is None if the caller has named a pool that exists.
    `operation_id` is the last operation that was written, and `team` is the team for which the holder acts."""

    store: Store
    name: str
    holder: str
    clock: Clock
    spec: PoolSpec | None
    operation_id: str | None = None
    team: str | None = None

    def carry_out(
        self,
        request: Callable[[Session], str],
        *,
        bring_up: bool = False,
        may_redefine: bool = False,
        owner: ProcessId | None = None,
        is_async: bool = False,
        on_progress: OnProgress | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Write an operation to the database and wait until the operation ends. Roll the operation back if the wait is
        interrupted.

        Raises:
            InvalidArgumentError: The pool would be brought up with another definition than that of another DAG or
                user, and `may_redefine` is False.
        """
        operation_id = ""
        try:
            while not operation_id:
                try:
                    with self.changing() as session:
                        started = self._begin_life(session, owner, may_redefine=may_redefine) if bring_up else None
                        operation_id = request(session)
                        # `prepare` creates the token before the commit, because nodes may start right after the commit.
                        if started:
                            backend_of(started).prepare(started)
                        operation = session.get_one(Operation, operation_id)
                # The pool is still going down, so it cannot be started yet. Wait until it is down, then try again.
                except errors.PoolStoppingError:
                    operation_id = ""
                    self.waiting.until_down(on_progress)
            reconciling.ensure_running()
            self.operation_id = operation_id
            if not is_async:
                patience = operation.deadline - operation.created_at
                with while_waiting():
                    self.waiting.for_operation(operation_id, patience, on_progress)
        except BaseException as error:
            if operation_id:
                self.give_up(operation_id, error)
            raise

    @contextmanager
    def changing(self, step: JournalStep = JournalStep.REQUEST) -> Iterator[Session]:
        """Open a transaction that changes the pool.

        Raises:
            TeamError: The pool belongs to another team, or would belong to another team after its start.
        """
        with transaction(self.store, step) as session:
            row = session.execute(select(Pool.spec, Pool.state).where(Pool.name == self.name)).first()
            owners = {None if row is None else row.spec.get("only_team")}
            if self.spec is not None and (row is None or row.state is not PoolState.UP):
                owners.add(self.spec.only_team)
            for owner in owners:
                require_team(owner, self.team, f'pool "{self.name}"', is_reserved=True)
            yield session
            sizes.note(session, self.name, self.clock())

    def _begin_life(self, session: Session, owner: ProcessId | None, *, may_redefine: bool) -> PoolSpec | None:
        """Set the pool's state to up. Return the pool's spec if the pool was down before, else None."""
        spec = self.spec_to_start(session)
        # Each home has a file of its own with the token of a connection.
        given = spec.model_copy(update={"token_file": None})
        uri, defined = redact(given.uri), history.creation(session, self.name)
        # The pool of a job is defined by who submits the job. Each job is another holder.
        definer = python_holder() if job_of(self.holder) else self.holder
        if (pool := session.get(Pool, spec.name)) is not None:
            before = PoolSpec.model_validate(pool.spec).model_copy(update={"token_file": None})
            is_same = before == given or (defined is not None and defined.detail == uri)
            if defined and not (is_same or may_redefine or definer_of(defined.actor) == definer_of(definer)):
                raise errors.InvalidArgumentError(
                    f'pool "{self.name}" is {defined.detail}, as {defined.actor} has defined it, and not {uri}: write '
                    "the same URI, or only the name. To change the definition for all, run `shoal pool alter "
                    f'{self.name}`, or `shoal pool down {self.name}` and `shoal pool up "{uri}"`'
                )
            bound_host.accept(pool, self.spec)
        was_down = commands.begin_life(session, spec, owner=owner.to_json() if owner else None, now=self.clock())
        if pool is None or not is_same:
            if was_down:
                self.record(session, ActionKind.CREATED, uri, holder=definer)
            else:
                log.warning('pool "%s" is up with another definition; %s counts from its next start', self.name, uri)
        return spec if was_down else None

    def record(
        self,
        session: Session,
        kind: ActionKind,
        detail: str | None = None,
        *,
        subject: str | None = None,
        **others: str | None,
    ) -> None:
        """Add a line to the record of actions; see `shoal.history.record`. `subject` is the name of the changed
        object. If it is None, the changed object is the pool."""
        of_pool: dict[str, Any] = {"holder": self.holder, "at": self.clock(), "pool": self.name, "detail": detail}
        history.record(session, kind, subject or self.name, **of_pool | others)

    def withdraw(self, operation_id: str, reason: str) -> bool:
        """Roll back an operation; return False if it has ended. The holder that has requested an operation may always
        roll it back, for example in a process that acts for no team.

        Raises:
            TeamError: The pool or the operation's lease belongs to another team, and to another holder.
        """
        with self.store.reading(snapshot=False) as session:
            operation = session.get(Operation, operation_id)
            lease = session.get(Lease, operation.lease_id) if operation and operation.lease_id else None
        is_own = operation is not None and operation.holder == self.holder
        with (
            transaction(self.store, JournalStep.WITHDRAW) if is_own else self.changing(JournalStep.WITHDRAW) as session
        ):
            if lease is not None and not is_own:
                require_team(lease.team, self.team, f'the lease of {lease.holder} on pool "{lease.pool}"')
            return withdraw(session, operation_id, reason, self.clock())

    def give_up(self, operation_id: str, error: BaseException) -> None:
        """Roll back an operation after an error has interrupted the wait for its end. If the store cannot be used, add
        a note to the error instead."""
        try:
            if self.withdraw(operation_id, "its caller was interrupted"):
                self.waiting.until_settled()
        except errors.TeamError as refusal:
            error.add_note(f"Operation {operation_id} goes on: {refusal}")
        except errors.StoreError:
            error.add_note(f"Operation {operation_id} could not be rolled back: run `shoal sweep` to end it")

    @property
    def waiting(self) -> Waiting:
        """Return the waits for this pool."""
        return Waiting(self.store, self.name, self.clock)

    def spec_to_start(self, session: Session) -> PoolSpec:
        """Return the spec with which the pool starts: the constructor's argument, else the spec in the pool's row.

        Raises:
            PoolElsewhereError: This home has recorded other settings.
        """
        if self.spec is not None:
            return self.spec
        pool = rows.load(session, self.name, lock=False).pool
        if why := bound_host.refusal(pool, is_new=True):
            raise errors.PoolElsewhereError(why)
        return PoolSpec.model_validate(pool.spec)

    def admit(self, size: int, *, bring_up: bool = False) -> None:
        """Raise an error if the pool can never have this many nodes, for example because its Ray cluster is too small.

        A pool that is bound to another machine is not checked here. `shoal.pool.journal.commands` makes all other
        checks when the request is written.
        """
        with self.store.reading() as session:
            pool = session.get(Pool, self.name)
            up = pool is not None and pool.state is PoolState.UP
            if not (up or bring_up) or (pool is not None and up and not is_here(pool)):
                return
            spec = PoolSpec.model_validate(pool.spec) if pool and up else self.spec_to_start(session)
        if (wanted := max(size, spec.min_nodes)) <= spec.max_nodes:
            backend_of(spec).admit(spec, wanted)

    def last_rolled_back(self) -> Operation | None:
        """Return this holder's last operation if it was rolled back, else None."""
        mine = select(Operation).where(Operation.pool == self.name, Operation.holder == self.holder)
        last = self.store.scalar(mine.order_by(Operation.created_at.desc()).limit(1))
        return last if last and last.state is OperationState.ROLLED_BACK else None
