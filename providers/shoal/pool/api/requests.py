"""Write a pool's operations and the record of actions into the store, and wait until operations end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal import history
from shoal.errors import PoolElsewhereError, PoolStoppingError, StoreError, TeamError
from shoal.os_processes import ProcessId
from shoal.pool import recorded, teams
from shoal.pool.backends import BACKENDS
from shoal.pool.bound_host import is_here
from shoal.pool.journal import commands, rows
from shoal.pool.journal.rollback import withdraw
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.pool.reconcile import background_process
from shoal.pool.reconcile.rounds import Clock
from shoal.pool.snapshot import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.pool.waiting import OnProgress, Waiting
from shoal.state import Store
from shoal.state.schema import ActionKind, Lease, Operation, OperationState, Pool, PoolState


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
        owner: ProcessId | None = None,
        is_async: bool = False,
        on_progress: OnProgress | None = None,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Write an operation to the database and wait until the operation ends. Roll the operation back if the wait is
        interrupted.
        """
        operation_id = ""
        try:
            while not operation_id:
                try:
                    with self.changing() as session:
                        started = self._begin_life(session, owner) if bring_up else None
                        operation_id = request(session)
                        # `prepare` creates the token before the commit, because nodes may start right after the commit.
                        if started:
                            BACKENDS[started.backend]().prepare(started)
                        operation = session.get_one(Operation, operation_id)
                # The pool is still going down, so it cannot be started yet. Wait until it is down, then try again.
                except PoolStoppingError:
                    operation_id = ""
                    self.waiting.until_down(on_progress)
            background_process.ensure_running()
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
                teams.require(owner, self.team, f'pool "{self.name}"', is_reserved=True)
            yield session

    def _begin_life(self, session: Session, owner: ProcessId | None) -> PoolSpec | None:
        """Set the pool's state to up. Return the pool's spec if the pool was down before, else None."""
        spec = self.spec_to_start(session)
        if (pool := session.get(Pool, spec.name)) is not None:
            recorded.accept(pool, self.spec)
        else:
            self.record(session, ActionKind.CREATED, spec.uri)
        was_down = commands.begin_life(session, spec, owner=owner.to_json() if owner else None, now=self.clock())
        return spec if was_down else None

    def record(
        self,
        session: Session,
        kind: ActionKind,
        detail: str | None = None,
        *,
        subject: str | None = None,
        operation_id: str | None = None,
    ) -> None:
        """Add a line to the record of actions; see `shoal.history.record`. `subject` is the name of the changed
        object. If it is None, the changed object is the pool."""
        history.record(
            session,
            kind,
            subject or self.name,
            holder=self.holder,
            at=self.clock(),
            pool=self.name,
            detail=detail,
            outcome=history.REQUESTED if operation_id else history.DONE,
            operation_id=operation_id,
        )

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
                teams.require(lease.team, self.team, f'the lease of {lease.holder} on pool "{lease.pool}"')
            return withdraw(session, operation_id, reason, self.clock())

    def give_up(self, operation_id: str, error: BaseException) -> None:
        """Roll back an operation after an error has interrupted the wait for its end. If the store cannot be used, add
        a note to the error instead."""
        try:
            if self.withdraw(operation_id, "its caller was interrupted"):
                self.waiting.until_settled()
        except TeamError as refusal:
            error.add_note(f"Operation {operation_id} goes on: {refusal}")
        except StoreError:
            error.add_note(f"Operation {operation_id} could not be rolled back: run `shoal sweep` to end it")

    def snapshot(self) -> Snapshot:
        """Read the rows of the pool."""
        with self.store.reading() as session:
            return rows.load(session, self.name, lock=False)

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
        if why := recorded.refusal(pool, is_new=True):
            raise PoolElsewhereError(why)
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
            BACKENDS[spec.backend]().admit(spec, wanted)

    def last_rolled_back(self) -> Operation | None:
        """Return this holder's last operation if it was rolled back, else None."""
        with self.store.reading() as session:
            last = session.scalars(
                select(Operation)
                .where(Operation.pool == self.name, Operation.holder == self.holder)
                .order_by(Operation.created_at.desc())
            ).first()
        return last if last and last.state is OperationState.ROLLED_BACK else None
