"""Record each promotion in the store: which version of a model became champion, and with which metric.

MLflow keeps no history of an alias, and has no compare-and-set: it cannot check and set an alias in one step. Therefore
a row is written into the store before an alias is set, and the row is marked as confirmed after that. The transactions
that write and confirm the row check that the process still holds the lock for the alias. The newest confirmed row tells
which champion shoal chose last. If the alias points to another version, it was moved by a person, or by a process that
had lost the lock.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal import history
from shoal.jobs.journal.locks import HeldLock
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.specs.register import Register
from shoal.pool.holder import job_holder
from shoal.redaction import redact_value
from shoal.state import Store
from shoal.state.schema import ActionKind, Job, Promotion, PromotionState

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Ledger:
    """Records of the promotions of one alias of a registered model. Each record is a row in the store.

    Args:
        store: Store that has the rows.
        registry: URI of the model registry, without credentials.
        model: Name of the registered model.
        alias: Name of the alias.
        actor: Holder that promotes, for the record of actions. None: the holder of the version's job.
    """

    store: Store
    registry: str
    model: str
    alias: str
    actor: str | None = None

    @classmethod
    def of(cls, client: MlflowClient, store: Store, register: Register, actor: str | None = None) -> Ledger:
        """Return the ledger (promotion records) for the model and the alias that `register` names."""
        return cls(store, redact_value(client._registry_uri), register.model, register.alias, actor)

    @property
    def lock_name(self) -> str:
        """Return the name of the lock in the store that a process must hold while it moves the model's alias."""
        registry = hashlib.sha256(self.registry.encode()).hexdigest()[:12]
        return f"promote:{registry}:{self.model}:{self.alias}"[:255]

    def intend(self, lock: HeldLock, promotion: Promotion) -> int | None:
        """Record an intended promotion as a row in the store, right before the alias is set in MLflow.

        Returns:
            Id of the row; None if the lock was lost, in which case nothing was written and the caller must not set the
            alias.
        """
        with transaction(self.store, JobStep.INTEND) as session:
            if not lock.renew(session):
                return None
            session.add(promotion)
            session.flush()
            return promotion.id

    def confirm(self, lock: HeldLock, promotion_id: int) -> bool:
        """Mark the row of a promotion in the store as confirmed, right after the alias was set in MLflow."""
        with transaction(self.store, JobStep.CONFIRM) as session:
            if not lock.renew(session):
                return False
            _confirm(session, session.get_one(Promotion, promotion_id), self.actor)
            return True

    def settle(self, lock: HeldLock, version: str | None) -> bool:
        """Confirm or withdraw the newest promotion if a process died after recording it and before confirming it.

        If the alias was set, the row is marked as confirmed, otherwise as withdrawn.
        """
        of_this_alias = select(Promotion).filter_by(registry_uri=self.registry, model=self.model, alias=self.alias)
        with transaction(self.store, JobStep.SETTLE) as session:
            if not lock.renew(session):
                return False
            newest = session.scalars(of_this_alias.order_by(Promotion.id.desc()).limit(1)).first()
            if newest is not None and newest.state is PromotionState.INTENDED:
                if newest.version == version:
                    _confirm(session, newest)
                else:
                    newest.state = PromotionState.WITHDRAWN
            return True

    def reopen(self, lock: HeldLock, promotion_id: int) -> bool:
        """Mark the row of a confirmed promotion as intended, right before the alias is given back. If this process
        dies before `withdraw`, `settle` finds out from the alias whether the promotion still counts.

        Returns:
            False if the lock was lost, in which case nothing was written and the caller must not set the alias.
        """
        with transaction(self.store, JobStep.INTEND) as session:
            if not lock.renew(session):
                return False
            session.get_one(Promotion, promotion_id).state = PromotionState.INTENDED
            return True

    def withdraw(self, lock: HeldLock, promotion_id: int) -> bool:
        """Mark the row of a promotion in the store as withdrawn, right after the alias was given back."""
        with transaction(self.store, JobStep.CONFIRM) as session:
            if not lock.renew(session):
                return False
            promotion = session.get_one(Promotion, promotion_id)
            promotion.state = PromotionState.WITHDRAWN
            _record(session, promotion, withdrawn(promotion, promotion.previous), time.time(), self.actor)
            return True

    def confirmed(self, since: int = 0) -> list[str]:
        """Return the versions to which confirmed promotions gave the model's alias, the newest promotion first."""
        return [each.version for each in self.history() if each.id >= since]

    def history(self) -> list[Promotion]:
        """Return the store's rows about this alias's confirmed promotions, the newest first."""
        found = confirmed_promotions(self.store, self.registry, self.model)
        return [each for each in found if each.alias == self.alias]


def confirmed_promotions(store: Store, registry: str | None = None, model: str | None = None) -> list[Promotion]:
    """Return the store's rows about confirmed promotions, the newest first."""
    query = select(Promotion).where(Promotion.state == PromotionState.CONFIRMED)
    if registry is not None:
        query = query.where(Promotion.registry_uri == registry)
    if model is not None:
        query = query.where(Promotion.model == model)
    with store.reading() as session:
        return list(session.scalars(query.order_by(Promotion.id.desc())))


def chosen_versions(session: Session, registry: str, model: str) -> set[str]:
    """Return the versions that shoal promoted last, one for each alias of a model, according to the store.

    For each alias, the result has the version of the newest confirmed promotion. If a process died after it wrote a
    newer promotion and before it confirmed that promotion, the newer promotion's version is returned, too.
    """
    query = (
        select(Promotion.alias, Promotion.version, Promotion.state)
        .where(
            Promotion.registry_uri == registry,
            Promotion.model == model,
            Promotion.state != PromotionState.WITHDRAWN,
        )
        .order_by(Promotion.id.desc())
    )
    chosen, done = set(), set()
    for alias, version, state in session.execute(query):
        if alias not in done:
            chosen.add(version)
            done |= {alias} if state is PromotionState.CONFIRMED else set()
    return chosen


def _confirm(session: Session, promotion: Promotion, actor: str | None = None) -> None:
    now = time.time()
    promotion.state, promotion.confirmed_at = PromotionState.CONFIRMED, now
    instead = "" if promotion.previous is None else f" instead of {promotion.previous}"
    value = "" if promotion.value is None else f", {promotion.metric}={promotion.value:.6g}"
    _record(session, promotion, f"version {promotion.version} became {promotion.alias}{instead}{value}", now, actor)


def withdrawn(promotion: Promotion, version: str | None) -> str:
    """Describe the withdrawal of a promotion, after which the alias points to the given version."""
    return f"{holding(promotion, version)}: the promotion of version {promotion.version} was withdrawn"


def holding(promotion: Promotion, version: str | None) -> str:
    """Describe which version has the alias of a promotion now."""
    return f"{'no version' if version is None else f'version {version}'} is {promotion.alias}"


def _record(session: Session, promotion: Promotion, detail: str, now: float, actor: str | None = None) -> None:
    job = session.get(Job, (promotion.job_id, promotion.attempt))
    history.record(
        session,
        ActionKind.PROMOTED,
        promotion.model,
        holder=actor or (job.holder if job else job_holder(promotion.job_id)),
        at=now,
        pool=job.pool if job else None,
        detail=f"{detail}, job {promotion.job_id}",
    )
