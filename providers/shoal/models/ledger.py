"""Record each promotion in the store: which version of a model became champion, and with which metric.

MLflow keeps no history of an alias, and has no compare-and-set: it cannot check and set an alias in one step. Therefore
a row is written into the store before an alias is set, and the row is marked as confirmed after that. The transactions
that write and confirm the row check that the process still holds the lock for the alias. The newest confirmed row tells
which champion shoal chose last. If the alias points to another version, it was moved by a person, or by a process that
had lost the lock.

A row is about a version of the registry only if its whole identity is that of the version (`is_of`). Rows about
versions that the registry does not have, because they were deleted or because another MLflow answers at the address, do
not count.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from shoal import history
from shoal.errors import RegistryError
from shoal.jobs.journal.steps import HeldLock, JobStep, act, patiently, store_lock, transaction
from shoal.jobs.mlflow_run import answering
from shoal.jobs.register import Register
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.lazy_imports import mlflow
from shoal.models.registry import DECISION_TAG, REASON_TAG, WITHDRAWN, Registry, VersionId, aliases_of
from shoal.pool.holder import job_holder
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.state.schema import ActionKind, Job, Promotion, PromotionState

_CLOCKS_S = 60.0
"""Seconds by which the clocks of MLflow and of the process that has recorded a promotion may differ."""


class AnotherRound(Exception):
    """The lock was lost, or the alias was moved meanwhile: the comparison or the withdrawal begins anew."""


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
    def of(cls, client: mlflow.MlflowClient, store: Store, register: Register, actor: str | None = None) -> Ledger:
        """Return the ledger (promotion records) for the model and the alias that `register` names."""
        return cls(store, redact_value(client._registry_uri), register.model, register.alias, actor)

    @property
    def lock_name(self) -> str:
        """Return the name of the lock in the store that a process must hold while it moves the model's alias."""
        registry = hashlib.sha256(self.registry.encode()).hexdigest()[:12]
        return f"promote:{registry}:{self.model}:{self.alias}"[:255]

    @contextmanager
    def _locked(self, lock: HeldLock, step: JobStep) -> Iterator[Session]:
        """Open a write transaction in which the lock is held. If the lock was lost, raise `AnotherRound`: nothing is
        written, and the caller must not set the alias."""
        with transaction(self.store, step) as session:
            if not lock.renew(session):
                raise AnotherRound
            yield session

    def intend(self, lock: HeldLock, promotion: Promotion) -> int:
        """Record an intended promotion as a row in the store, right before the alias is set in MLflow, and return the
        id of the row."""
        with self._locked(lock, JobStep.INTEND) as session:
            if session.get(Job, (promotion.job_id, promotion.attempt)) is None:
                promotion.attempt = None
            session.add(promotion)
            session.flush()
            return promotion.id

    def confirm(self, lock: HeldLock, promotion_id: int) -> None:
        """Mark the row of a promotion in the store as confirmed, right after the alias was set in MLflow."""
        with self._locked(lock, JobStep.CONFIRM) as session:
            _confirm(session, session.get_one(Promotion, promotion_id), self.actor)

    def settle(self, lock: HeldLock, version: VersionId | None) -> None:
        """Confirm or withdraw the newest promotion if a process died after recording it and before confirming it.

        If the alias was set, the row is marked as confirmed, otherwise as withdrawn.
        """
        with self._locked(lock, JobStep.SETTLE) as session:
            newest = session.scalars(self._rows().order_by(Promotion.id.desc()).limit(1)).first()
            if newest is not None and newest.state is PromotionState.INTENDED:
                if is_of(newest, version):
                    _confirm(session, newest)
                else:
                    newest.state = PromotionState.WITHDRAWN

    def reopen(self, lock: HeldLock, promotion_id: int) -> None:
        """Mark the row of a confirmed promotion as intended, right before the alias is given back. If this process
        dies before `withdraw`, `settle` finds out from the alias whether the promotion still counts."""
        with self._locked(lock, JobStep.INTEND) as session:
            session.get_one(Promotion, promotion_id).state = PromotionState.INTENDED

    def withdraw(self, lock: HeldLock, promotion_id: int, alias: VersionId | None) -> None:
        """Mark the row of a promotion in the store as withdrawn, right after the alias was given back to the version
        `alias`, or while this later version has the alias."""
        with self._locked(lock, JobStep.CONFIRM) as session:
            promotion = session.get_one(Promotion, promotion_id)
            promotion.state = PromotionState.WITHDRAWN
            promotion.withdrawn_after = session.scalar(self._rows().with_only_columns(func.max(Promotion.id)))
            _record(session, promotion, withdrawn(promotion, alias), time.time(), self.actor)

    def before(self, promotion: Promotion) -> VersionId | None:
        """Return the version that gets the alias if a promotion is withdrawn (see `predecessor`)."""
        return predecessor(promotion, self.store.scalars(self._rows().order_by(Promotion.id.desc())))

    def unmatched(self, client: mlflow.MlflowClient) -> str | None:
        """Say that the registry does not have the version that shoal promoted last; None if it has this version."""
        newest = next(iter(self.history()), None)
        if newest is None or is_of(newest, VersionId.read(client, self.model, newest.version)):
            return None
        return (
            f"{self.model} version {newest.version}, which became {self.alias} in job {newest.job_id}, does not exist "
            f"any more in the MLflow registry {self.registry}: it was deleted, or another MLflow answers at this "
            "address. Recorded promotions of versions that do not exist do not count"
        )

    def history(self) -> list[Promotion]:
        """Return the store's rows about this alias's confirmed promotions, the newest first."""
        found = confirmed_promotions(self.store, self.registry, self.model)
        return [each for each in found if each.alias == self.alias]

    def _rows(self) -> Select[Promotion]:
        return select(Promotion).filter_by(registry_uri=self.registry, model=self.model, alias=self.alias)


def version_of(promotion: Promotion) -> VersionId:
    """Return the version to which a promotion has set the alias, as it was recorded."""
    return VersionId.recorded(promotion.version, promotion.version_identity)


def is_of(promotion: Promotion, version: VersionId | None) -> bool:
    """Return whether a promotion has set the alias to this version of the registry."""
    return version is not None and is_recorded(version_of(promotion), promotion, version)


def promotions_of(version: VersionId, promotions: Iterable[Promotion]) -> list[Promotion]:
    """Return the promotions of a version of the registry, in the given order."""
    return [each for each in promotions if is_of(each, version)]


def is_recorded(recorded: VersionId, promotion: Promotion, version: VersionId) -> bool:
    """Return whether the identity that a promotion has recorded is that of this version of the registry."""
    if recorded.exists or version.created_at is None:
        return recorded.exists and recorded == version
    # An older shoal has recorded only the number. A version that was registered after the promotion is another one.
    return recorded.number == version.number and version.created_at / 1000 <= promotion.created_at + _CLOCKS_S


def predecessor(promotion: Promotion, promotions: Iterable[Promotion]) -> VersionId | None:
    """Return the version that gets the alias back if a promotion is withdrawn; None if no version gets it.

    This is the version that had the alias before, unless its own promotion was withdrawn since: then it is the version
    before that, and so on.

    Args:
        promotion: The promotion.
        promotions: All rows about the alias, the newest first.
    """
    rows = [each for each in promotions if each.confirmed_at is not None]
    while promotion.previous is not None:
        version = VersionId.recorded(promotion.previous, promotion.previous_identity)
        of_it = [each for each in rows if is_of(each, version) or version_of(each) == version]
        if not of_it or of_it[0].withdrawn_after is None or of_it[0].withdrawn_after < promotion.id:
            return version
        earlier = next((each for each in of_it if each.id < promotion.id), None)
        if earlier is None:  # a person has given the alias to the version
            return None
        promotion = earlier
    return None


def confirmed_promotions(store: Store, registry: str | None = None, model: str | None = None) -> Sequence[Promotion]:
    """Return the store's rows about confirmed promotions, the newest first."""
    given = {name: each for name, each in (("registry_uri", registry), ("model", model)) if each is not None}
    query = select(Promotion).filter_by(state=PromotionState.CONFIRMED, **given)
    return store.scalars(query.order_by(Promotion.id.desc()))


def last_promotions(session: Session, registry: str, model: str) -> list[Promotion]:
    """Return the last promotions of a model, one for each alias, according to the store.

    For each alias, the result has the newest confirmed promotion. If a process died after it wrote a newer promotion
    and before it confirmed that promotion, the newer promotion is returned, too.
    """
    query = select(Promotion).filter_by(registry_uri=registry, model=model)
    query = query.where(Promotion.state != PromotionState.WITHDRAWN).order_by(Promotion.id.desc())
    last, done = [], set()
    for promotion in session.scalars(query):
        if promotion.alias not in done:
            last.append(promotion)
            done |= {promotion.alias} if promotion.state is PromotionState.CONFIRMED else set()
    return last


def _confirm(session: Session, promotion: Promotion, actor: str | None = None) -> None:
    now = time.time()
    promotion.state, promotion.confirmed_at = PromotionState.CONFIRMED, now
    instead = "" if promotion.previous is None else f" instead of {promotion.previous}"
    value = "" if promotion.value is None else f", {promotion.metric}={promotion.value:.6g}"
    _record(session, promotion, f"version {promotion.version} became {promotion.alias}{instead}{value}", now, actor)


def withdrawn(promotion: Promotion, version: VersionId | None) -> str:
    """Describe the withdrawal of a promotion, after which the alias points to the given version."""
    named = "no version" if version is None else f"version {version}"
    if version is not None and version.number == promotion.version and not is_of(promotion, version):
        named = f"another version {version}, which was registered later,"
    return f"{named} is {promotion.alias}: the promotion of version {promotion.version} was withdrawn"


def _record(session: Session, promotion: Promotion, detail: str, now: float, actor: str | None = None) -> None:
    job = promotion.attempt and session.get(Job, (promotion.job_id, promotion.attempt))
    history.record(
        session,
        ActionKind.PROMOTED,
        promotion.model,
        holder=actor or (job.holder if job else job_holder(promotion.job_id)),
        at=now,
        pool=job.pool if job else None,
        detail=f"{detail}, job {promotion.job_id}",
    )


@dataclass
class Withdrawal:
    """Withdrawal of one promotion, which is repeated if the lock of the alias is lost meanwhile.

    If the lock was lost before the alias was given back, another process may have promoted a version meanwhile. The
    next round gives the alias to this version.

    Attributes:
        registry: Registry of the model.
        ledger: Records of the promotions of the alias.
        promotion: The promotion to withdraw.
        written: Versions to which this process has given the alias. None stands for the removal of the alias.
    """

    registry: Registry
    ledger: Ledger
    promotion: Promotion
    written: set[VersionId | None] = field(default_factory=set)

    def done(self) -> str:
        """Withdraw the promotion, and return a sentence that says which version has the alias now."""
        with answering(self.registry.uri):
            while True:
                with suppress(AnotherRound):
                    return patiently(self.ledger.store, self.round)

    def round(self) -> str:
        """Withdraw the promotion once."""
        mine = self.promotion
        with store_lock(self.ledger.store, self.ledger.lock_name, PROMOTION_LOCK_TTL_S) as lock:
            model = self.registry.model(mine.model)
            number = aliases_of(model).get(mine.alias) if model else None
            alias = None if number is None else VersionId.read(self.registry.client, mine.model, number)
            self.ledger.settle(lock, alias)
            newest = next(iter(self.ledger.history()), None)
            if newest is not None and newest.id == mine.id and (is_of(mine, alias) or alias in self.written):
                return self._give_back(lock)
            is_later = newest is not None and newest.id > mine.id
            if newest is not None and is_later and not is_of(newest, alias) and alias in self.written:
                self._set_alias(version_of(newest))
                raise AnotherRound  # it checks that no other process has set the alias meanwhile
            with self.ledger.store.reading() as session:
                state = session.get_one(Promotion, mine.id).state
            if state is not PromotionState.WITHDRAWN:
                self._tag(withdrawn(mine, alias))
                self.ledger.withdraw(lock, mine.id, alias)
            return withdrawn(mine, alias)

    def _give_back(self, lock: HeldLock) -> str:
        mine, before, client = self.promotion, self.ledger.before(self.promotion), self.registry.client
        if before is not None:
            found = VersionId.read(client, mine.model, before.number)
            why = None
            if not found.exists or not is_recorded(before, mine, found):
                why = "does not exist any more"
            elif client.get_model_version(mine.model, before.number).tags.get(REASON_TAG) == WITHDRAWN:
                why = "was withdrawn itself"  # through another store
            if why is not None:
                raise RegistryError(
                    f"the promotion of {mine.model} version {mine.version} cannot be withdrawn, because version "
                    f'{before}, which was {mine.alias} before, {why}: give the alias "{mine.alias}" to another version '
                    "in MLflow"
                )
            before = found
        sentence = withdrawn(mine, before)
        self._tag(sentence)
        self.ledger.reopen(lock, mine.id)
        self._set_alias(before)
        self.ledger.withdraw(lock, mine.id, before)
        return sentence

    def _tag(self, sentence: str) -> None:
        """Mark the version as withdrawn in MLflow, if it still exists there."""
        mine, client = self.promotion, self.registry.client
        if is_of(mine, VersionId.read(client, mine.model, mine.version)):
            client.set_model_version_tag(mine.model, mine.version, REASON_TAG, WITHDRAWN)
            client.set_model_version_tag(mine.model, mine.version, DECISION_TAG, sentence)

    def _set_alias(self, version: VersionId | None) -> None:
        client, mine = self.registry.client, self.promotion
        self.written.add(version)
        with act(JobStep.PROMOTE):
            if version is None:
                client.delete_registered_model_alias(mine.model, mine.alias)
            else:
                client.set_registered_model_alias(mine.model, mine.alias, version.number)
