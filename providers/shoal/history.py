"""Record and read the history of actions on pools, jobs and models: the actor, the action, the changed object, the time
and the outcome.

Each action adds a line to the record, in the same transaction as the change itself. So the record has a line about a
change exactly if the change was committed. Lines are only added, and never changed or deleted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, shown
from shoal.os_processes import hostname
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.schema import Action, ActionKind

__all__ = ["ActionKind", "Entry", "acting_as", "is_named", "read", "record", "record_end", "record_sweep"]

DONE = "done"
"""Outcome of an action that was complete as soon as it was recorded."""

REQUESTED = "requested"
"""Outcome of an operation that was requested. A second line is added to the record when the operation ends."""

MOST_READ = 100_000
"""Greatest number of lines of the record of actions that `read` returns."""

_LONGEST = 2000
"""Greatest length of a text in a line, in characters. Longer texts are cut. The errors of nodes and jobs may be
long."""

_LONGEST_NAME = 500
"""Greatest length of an actor's name. A holder contains Airflow's DAG id and run id, of up to 250 characters each."""

_actor: ContextVar[str | None] = ContextVar("shoal_actor", default=None)


@dataclass(frozen=True)
class Entry:
    """One line of the record of actions: who changed a pool, a job or a model, when, and with which outcome.

    Attributes:
        id: Number of the line. Later lines have greater numbers.
        at: Time of the action, in seconds since the epoch.
        actor: Name of the user, run or process that acted: the name given to `acting_as`, else the holder.
        kind: What was done.
        pool: Name of the pool; None for an action that belongs to no pool.
        subject: Name of the changed object: a pool, the holder of a lease, the id of a job, or a model. The host, for a
            sweep.
        detail: Details of the request, such as the sizes before and after; None if there are no details.
        outcome: ``done``, or for an operation ``requested``, ``succeeded``, ``superseded: …`` or ``rolled back: …``.
        operation_id: Id of the operation, which the line of its request and the line of its end have in common; None
            for an action that is complete at once.
    """

    id: int
    at: float
    actor: str
    kind: ActionKind
    pool: str | None
    subject: str
    detail: str | None
    outcome: str
    operation_id: str | None


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Record the actions inside the ``with`` block under a name, such as the name of the user who is logged in.

    The name applies to this thread or asyncio task only. In nested blocks, the innermost name applies.

    Raises:
        InvalidArgumentError: The name is empty or too long.

    Example:
        >>> with acting_as("airflow:anna"):
        ...     shoal.scale_cluster(3, pool_name="retrain")
    """
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME:
        raise InvalidArgumentError(f"name={shown(name)}: it has to be a text of 1 to {_LONGEST_NAME} characters")
    token = _actor.set(name)
    try:
        yield
    finally:
        _actor.reset(token)


def is_named() -> bool:
    """Return whether the code runs inside a block of `acting_as`."""
    return _actor.get() is not None


def record(
    session: Session,
    kind: ActionKind,
    subject: str,
    *,
    holder: str,
    at: float,
    pool: str | None = None,
    detail: str | None = None,
    outcome: str | None = None,
    operation_id: str | None = None,
) -> None:
    """Add a line to the record of actions, in the transaction that makes the change. Credentials are removed from the
    line's texts. Without an `outcome`, an operation is requested, and any other action is done.
    """
    session.add(
        Action(
            at=at,
            actor=_text(_actor.get() or holder),
            kind=kind,
            pool=pool,
            subject=_text(subject),
            detail=detail and _text(detail),
            outcome=_text(outcome or (REQUESTED if operation_id else DONE)),
            operation_id=operation_id,
        )
    )


def creation(session: Session, pool: str) -> Action | None:
    """Return the newest line about the definition of a pool, with its URI as detail; None if there is none."""
    query = select(Action).where(Action.pool == pool, Action.kind == ActionKind.CREATED).order_by(Action.id.desc())
    return session.scalars(query.limit(1)).first()


def record_sweep(store: Store, did: Sequence[str], *, holder: str) -> None:
    """Add a sweep (a clean-up of this host's nodes and jobs) to the record of actions.

    A sweep that found nothing to do is recorded only inside a block of `acting_as`, because then a user has asked for
    the sweep. Clean-up tasks and janitors sweep often, and would fill the record with such lines.
    """
    if did or is_named():
        with store.transaction() as session:
            record(
                session, ActionKind.SWEPT, hostname(), holder=holder, at=time.time(), detail="; ".join(did) or None,
                outcome=DONE if did else "nothing to sweep",
            )  # fmt: skip


def record_end(session: Session, operation_id: str, outcome: str, *, at: float) -> None:
    """Add a line about the end of an operation to the record. The line names the actor who requested the operation."""
    asked = session.scalars(select(Action).where(Action.operation_id == operation_id).order_by(Action.id)).first()
    if asked is not None:
        same = {name: getattr(asked, name) for name in ("actor", "kind", "pool", "subject", "detail", "operation_id")}
        session.add(Action(at=at, outcome=_text(outcome), **same))


def read(
    *,
    pool: str | None = None,
    kind: ActionKind | str | None = None,
    since: float | None = None,
    limit: int = 100,
    store: Store | None = None,
) -> list[Entry]:
    """Return lines of the record of actions, the newest first.

    Raises:
        InvalidArgumentError: An argument is not legal.
        StoreError: The store cannot be used.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_READ:
        raise InvalidArgumentError(f"limit={shown(limit)} is not legal: use a whole number from 1 to {MOST_READ}")
    is_time = isinstance(since, int | float) and not isinstance(since, bool) and math.isfinite(since)
    if since is not None and not is_time:
        raise InvalidArgumentError(
            f"since={shown(since)} is not legal: use seconds since the epoch, as time.time() returns"
        )
    query = select(Action).order_by(Action.id.desc()).limit(limit)
    if pool is not None:
        query = query.where(Action.pool == pool)
    if kind is not None:
        try:
            query = query.where(Action.kind == ActionKind(kind))
        except ValueError:
            known = ", ".join(ActionKind)
            raise InvalidArgumentError(f"kind={shown(kind)} is not legal: use one of {known}") from None
    if since is not None:
        query = query.where(Action.at >= since)
    found = (store or Store()).scalars(query)
    return [Entry(**{column.name: getattr(row, column.name) for column in fields(Entry)}) for row in found]


def _text(text: str) -> str:
    text = redact(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
