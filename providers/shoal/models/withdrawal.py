"""Withdraw the promotion of a job's model, so that the version that was champion before is champion again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, RegistryError
from shoal.jobs.journal import attempts, owners
from shoal.jobs.journal.steps import HeldLock, JobStep, act, patiently, store_lock
from shoal.jobs.kind import parse_spec
from shoal.jobs.results import JobResult
from shoal.jobs.submission import attach
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.models.ledger import Ledger, is_of, is_recorded, version_of, withdrawn
from shoal.models.registry import (
    DECISION_TAG,
    REASON_TAG,
    WITHDRAWN,
    Registry,
    VersionId,
    aliases_of,
    answering,
)
from shoal.pool.holder import python_holder
from shoal.state import Store
from shoal.state.schema import Job, Promotion, PromotionState


def withdraw_promotion(
    job_id: str, attempt: int | None = None, *, tracking_uri: str | None = None, holder: str | None = None
) -> str:
    """Withdraw the promotion of the model that a job has trained: give the champion's alias back to the version that
    had it before, if the job's version still has the alias. If a later version has the alias, this version keeps it,
    and the withdrawn version does not get the alias back if the later promotion is withdrawn, too.

    The version stays registered. Later trainings are not skipped because this version has the same rows, and a repeated
    flow run does not take over the job. A second call does nothing.

    Args:
        job_id: Id of the job.
        attempt: Number of the attempt, from 1. None: the newest attempt.
        tracking_uri: URI of the MLflow server or database. None: the URI in the job's spec.
        holder: Name of the user or run that withdraws, for the record of actions. None: this process.

    Returns:
        A sentence that says which version has the alias now.

    Raises:
        JobError: There is no such job.
        TeamError: The job belongs to another team.
        InvalidArgumentError: The job has promoted no model.
        RegistryError: The registry cannot be used, or the version that had the alias before was deleted or withdrawn.
        MissingExtraError: MLflow is not installed.

    Example:
        >>> withdraw_promotion("xgboost-3f2a9c")
        'version 3 is champion: the promotion of version 4 was withdrawn'
    """
    store = Store()
    key = attach(job_id, attempt, store=store).target.key
    job = attempts.load(store, key)
    promotion = _promotion_of(store, job)
    holder = holder or python_holder()
    owners.require_for_version(store, key.job_id, key.attempt, holder)
    attempts.give_up(store, key, time.time())
    registry = Registry.open(tracking_uri or _tracking_uri(job))
    if registry is None or registry.uri != promotion.registry_uri:
        raise RegistryError(
            f"the model {promotion.model} was promoted in the MLflow registry {promotion.registry_uri}: "
            "name this registry as tracking_uri"
        )
    ledger = Ledger(store, registry.uri, promotion.model, promotion.alias, holder)
    return Withdrawal(registry, ledger, promotion).done()


def _tracking_uri(job: Job) -> str | None:
    tracking = parse_spec(job.spec).tracking
    return tracking.uri if tracking else None


def _promotion_of(store: Store, job: Job) -> Promotion:
    """Return the newest promotion of the version that a job has registered."""
    version = JobResult.model_validate(job.result).model_version if job.result else None
    query = select(Promotion).filter_by(job_id=job.id, attempt=job.attempt, version=version)
    with store.reading() as session:
        promotion = session.scalars(query.order_by(Promotion.id.desc()).limit(1)).first()
    if promotion is None:
        raise InvalidArgumentError(
            f'job "{job.id}" (attempt {job.attempt}) has promoted no model: name the job of a promoted version, '
            "which `shoal models history` shows"
        )
    return promotion


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
            while (sentence := patiently(self.ledger.store, self.round)) is None:
                pass
        return sentence

    def round(self) -> str | None:
        """Withdraw the promotion once; return None if the lock was lost meanwhile, so that another round is needed."""
        mine = self.promotion
        with store_lock(self.ledger.store, self.ledger.lock_name, PROMOTION_LOCK_TTL_S) as lock:
            model = self.registry.model(mine.model)
            number = aliases_of(model).get(mine.alias) if model else None
            alias = None if number is None else VersionId.read(self.registry.client, mine.model, number)
            if not self.ledger.settle(lock, alias):
                return None
            newest = next(iter(self.ledger.history()), None)
            if newest is not None and newest.id == mine.id and (is_of(mine, alias) or alias in self.written):
                return self._give_back(lock)
            is_later = newest is not None and newest.id > mine.id
            if newest is not None and is_later and not is_of(newest, alias) and alias in self.written:
                self._set_alias(version_of(newest))
                return None  # the next round checks that no other process has set the alias meanwhile
            if not self._is_withdrawn():
                self._tag(withdrawn(mine, alias))
                if not self.ledger.withdraw(lock, mine.id, alias):
                    return None
            return withdrawn(mine, alias)

    def _give_back(self, lock: HeldLock) -> str | None:
        mine, before = self.promotion, self.ledger.before(self.promotion)
        if before is not None:
            before = self._checked(before)
        sentence = withdrawn(mine, before)
        self._tag(sentence)
        if not self.ledger.reopen(lock, mine.id):
            return None
        self._set_alias(before)
        return sentence if self.ledger.withdraw(lock, mine.id, before) else None

    def _tag(self, sentence: str) -> None:
        """Mark the version as withdrawn in MLflow, if it still exists there."""
        mine, client = self.promotion, self.registry.client
        if is_of(mine, VersionId.read(client, mine.model, mine.version)):
            client.set_model_version_tag(mine.model, mine.version, REASON_TAG, WITHDRAWN)
            client.set_model_version_tag(mine.model, mine.version, DECISION_TAG, sentence)

    def _checked(self, before: VersionId) -> VersionId:
        """Check that the version that had the alias before still exists, and was not withdrawn itself.

        Raises:
            RegistryError: It does not exist, or was withdrawn through another store.
        """
        mine, client = self.promotion, self.registry.client
        found = VersionId.read(client, mine.model, before.number)
        if not found.exists or not is_recorded(before, mine, found):
            why = "does not exist any more"
        elif client.get_model_version(mine.model, before.number).tags.get(REASON_TAG) == WITHDRAWN:
            why = "was withdrawn itself"
        else:
            return found
        raise RegistryError(
            f"the promotion of {mine.model} version {mine.version} cannot be withdrawn, because version {before}, "
            f'which was {mine.alias} before, {why}: give the alias "{mine.alias}" to another version in MLflow'
        )

    def _set_alias(self, version: VersionId | None) -> None:
        client, mine = self.registry.client, self.promotion
        self.written.add(version)
        with act(JobStep.PROMOTE):
            if version is None:
                client.delete_registered_model_alias(mine.model, mine.alias)
            else:
                client.set_registered_model_alias(mine.model, mine.alias, version.number)

    def _is_withdrawn(self) -> bool:
        with self.ledger.store.reading() as session:
            return session.get_one(Promotion, self.promotion.id).state is PromotionState.WITHDRAWN
