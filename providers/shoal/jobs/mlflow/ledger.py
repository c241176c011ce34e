"""Record in the store which version shoal gave a model's alias to, and by which metric.

MLflow's aliases have no history and no compare-and-swap. A row is written before an alias is set, and confirmed after
that, each in a transaction that checks the lock. The newest confirmed row is the champion that shoal chose last. If the
alias points to another version, a person has moved the alias, or a process that had lost the lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, select

from shoal.jobs.credentials import without_credentials
from shoal.jobs.journal.locks import HeldLock
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.spec import Register
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Ledger:
    """Record of the promotions of one alias.

    Args:
        store: Store that has the rows.
        registry: URI of the model registry, without credentials.
        model: Name of the registered model.
        alias: Name of the alias.
    """

    store: Store
    registry: str
    model: str
    alias: str

    @classmethod
    def of(cls, client: MlflowClient, store: Store, register: Register) -> Ledger:
        """Return the record of the alias that a model is registered for."""
        return cls(store, without_credentials(client._registry_uri), register.model, register.alias)

    def intend(self, lock: HeldLock, promotion: Promotion) -> int | None:
        """Record an intended promotion, right before the alias is set.

        Returns:
            Id of the row; None if the lock was lost: the alias must not be set then.
        """
        with transaction(self.store, JobStep.INTEND) as session:
            if not lock.renew(session):
                return None
            session.add(promotion)
            session.flush()
            return promotion.id

    def confirm(self, lock: HeldLock, promotion_id: int) -> bool:
        """Confirm that the alias was set; return False if the lock was lost and others may have set the alias too."""
        with transaction(self.store, JobStep.CONFIRM) as session:
            if not lock.renew(session):
                return False
            _confirm(session.get_one(Promotion, promotion_id))
            return True

    def settle(self, lock: HeldLock, version: str | None) -> bool:
        """Complete or withdraw a promotion whose process died between `intend` and `confirm`.

        Args:
            lock: Lock that the caller holds.
            version: Version that the alias points to now.

        Returns:
            False if the lock was lost; nothing was changed then.
        """
        with transaction(self.store, JobStep.SETTLE) as session:
            if not lock.renew(session):
                return False
            newest = session.scalars(
                select(Promotion).where(self._of_this_alias()).order_by(Promotion.id.desc()).limit(1)
            ).first()
            if newest is not None and newest.state is PromotionState.INTENDED:
                if newest.version == version:
                    _confirm(newest)
                else:
                    newest.state = PromotionState.WITHDRAWN
            return True

    def confirmed(self, since: int = 0) -> list[str]:
        """Return the versions of confirmed promotions, the newest first.

        Args:
            since: Id of the oldest row to include.
        """
        query = (
            select(Promotion.version)
            .where(self._of_this_alias(), Promotion.id >= since, Promotion.state == PromotionState.CONFIRMED)
            .order_by(Promotion.id.desc())
        )
        with self.store.reading() as session:
            return list(session.scalars(query))

    def history(self, limit: int) -> list[Promotion]:
        """Return the last confirmed promotions, the newest first.

        Args:
            limit: Greatest number of promotions.
        """
        query = (
            select(Promotion)
            .where(self._of_this_alias(), Promotion.state == PromotionState.CONFIRMED)
            .order_by(Promotion.id.desc())
            .limit(limit)
        )
        with self.store.reading() as session:
            return list(session.scalars(query))

    def _of_this_alias(self) -> ColumnElement[bool]:
        return and_(
            Promotion.registry_uri == self.registry,
            Promotion.model == self.model,
            Promotion.alias == self.alias,
        )


def _confirm(promotion: Promotion) -> None:
    promotion.state, promotion.confirmed_at = PromotionState.CONFIRMED, time.time()
