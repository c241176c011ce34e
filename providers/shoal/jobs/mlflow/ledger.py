"""The record of promotions in the store: which version shoal gave a model's alias to, and why.

MLflow's aliases have no history and no compare-and-set. A row is written before an alias is set and confirmed after it,
each in a transaction that checks the lock. The newest confirmed row is the champion that shoal chose last. Where the
alias has another version, a person moved it, or a process that had lost the lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, select

from shoal.jobs.journal.locks import HeldLock
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState


@dataclass(frozen=True)
class Ledger:
    """The promotions of one alias.

    Args:
        store: Where they are kept.
        registry: URI of the registry, without credentials.
        model: The registered model.
        alias: Its alias.
    """

    store: Store
    registry: str
    model: str
    alias: str

    def intend(self, lock: HeldLock, promotion: Promotion) -> int | None:
        """Write an intent, right before the alias is set.

        Returns:
            Its id; None when the lock was lost: the alias must not be set.
        """
        with transaction(self.store, JobStep.INTEND) as session:
            if not lock.renew(session):
                return None
            session.add(promotion)
            session.flush()
            return promotion.id

    def confirm(self, lock: HeldLock, promotion_id: int) -> bool:
        """Note that the alias was set; False when the lock was lost meanwhile, and another may have set it too."""
        with transaction(self.store, JobStep.CONFIRM) as session:
            if not lock.renew(session):
                return False
            _confirm(session.get_one(Promotion, promotion_id))
            return True

    def settle(self, lock: HeldLock, version: str | None) -> bool:
        """Complete what a process left that died between intent and confirmation.

        Args:
            lock: Held.
            version: The one that has the alias now.

        Returns:
            False when the lock was lost, and nothing was changed.
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
        """Versions that were promoted, the newest first.

        Args:
            since: Id of the oldest row that counts.
        """
        query = (
            select(Promotion.version)
            .where(self._of_this_alias(), Promotion.id >= since, Promotion.state == PromotionState.CONFIRMED)
            .order_by(Promotion.id.desc())
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
