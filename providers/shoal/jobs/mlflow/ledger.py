"""Record each promotion in the store: which version of a model got the alias, and with which metric.

MLflow keeps no history of an alias, and cannot set an alias only on the condition that it still has the expected value.
Therefore a row is written before an alias is set, and is marked as confirmed after that. Both transactions check that
the process still holds the lock for the alias. The newest confirmed row tells which champion shoal chose last. If the
alias points to another version, it was moved by a person, or by a process that had lost the lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, select

from shoal.jobs.credentials import without_credentials
from shoal.jobs.journal.locks import HeldLock
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.specs.register import Register
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Ledger:
    """Access to the store's rows that record the promotions of one alias.

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
        """Return the ledger of the model and alias that `register` names, in the MLflow registry that `client` uses."""
        return cls(store, without_credentials(client._registry_uri), register.model, register.alias)

    def intend(self, lock: HeldLock, promotion: Promotion) -> int | None:
        """Write the row that records a promotion, right before the alias is set in MLflow.

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
        """Mark a promotion's row as confirmed, right after the alias was set.

        Returns:
            False if the lock was lost; another process may also have set the alias then.
        """
        with transaction(self.store, JobStep.CONFIRM) as session:
            if not lock.renew(session):
                return False
            _confirm(session.get_one(Promotion, promotion_id))
            return True

    def settle(self, lock: HeldLock, version: str | None) -> bool:
        """Mark a promotion as confirmed or withdrawn if the promoting process died between `intend` and `confirm`.

        If the alias was set, the row is marked as confirmed, otherwise as withdrawn.

        Args:
            lock: Lock for the alias, which the caller holds.
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
        """Return the versions that got the alias in confirmed promotions, the newest promotion first.

        Args:
            since: Id of the oldest row to include; 0: all rows.
        """
        query = (
            select(Promotion.version)
            .where(self._of_this_alias(), Promotion.id >= since, Promotion.state == PromotionState.CONFIRMED)
            .order_by(Promotion.id.desc())
        )
        with self.store.reading() as session:
            return list(session.scalars(query))

    def history(self, limit: int) -> list[Promotion]:
        """Return the rows of the latest confirmed promotions, the newest first.

        Args:
            limit: Largest number of rows to return.
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
