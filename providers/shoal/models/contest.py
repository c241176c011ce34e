"""Give the champion's alias to the better of two versions, also if several processes promote versions at the same time.

The champion is the registered version that has the alias.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, JobError, RegistryError
from shoal.jobs import teams
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.locks import HeldLock, store_lock
from shoal.jobs.journal.steps import JobStep, act, patiently
from shoal.jobs.kind import parse_spec
from shoal.jobs.mlflow_run import metric_name
from shoal.jobs.results import ChampionResult, DecisionResult, JobResult, RecentVersion
from shoal.jobs.specs.register import Register
from shoal.jobs.submission import attach
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.models.decision import (
    Baseline,
    Candidate,
    Evaluation,
    alias_moved,
    champion_unread,
    decide,
    promoted_before,
    strongest,
    waiting,
)
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

if TYPE_CHECKING:
    from mlflow import MlflowClient


class UnreadChampionError(JobError):
    """The champion cannot be loaded, or cannot predict the holdout."""


@dataclass(frozen=True)
class Outcome:
    """Result of the comparison of a challenger with the champion, and of the promotion if the challenger is better.

    Attributes:
        model: Name of the registered model.
        challenger: The new version in the registry, with its metrics on the holdout.
        champion: Version that the challenger was compared with; None if the alias pointed to no version.
        decision: Whether the challenger was given the alias, and why.
        recent: Versions that were registered before the challenger, the newest first.
    """

    model: str
    challenger: Candidate
    champion: Candidate | None
    decision: DecisionResult
    recent: tuple[RecentVersion, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Return the values of the challenger's metrics, by their names in MLflow: ``holdout-<metric>``."""
        return logged_metrics(self.challenger.evaluation)

    def result(self) -> dict[str, Any]:
        """Return the fields of a job's result that say whether the new model was promoted, and why."""
        champion = None
        if known := self.champion:
            unseen, rows = known.unseen, None
            all_decided = unseen is None or (not unseen.enough and self.challenger.evaluation.overlaps)
            if unseen is not None and not all_decided and unseen.rows < unseen.holdout_rows:
                rows = unseen.rows
            elif known.common is not None:
                rows = known.common.rows
            champion = ChampionResult(version=known.version.number, value=known.value, unseen_rows=rows)
        return {
            "model_name": self.model,
            "model_version": self.challenger.version.number,
            "promoted": self.decision.promoted,
            "champion": champion,
            "decision": self.decision,
            "recent": self.recent,
        }


@dataclass(frozen=True)
class _Standing:
    """State of the champion's alias at the start of a comparison. If the state changes meanwhile, the comparison is
    repeated.

    Attributes:
        alias: Version that the alias points to; None if there is no such alias.
        rivals: Versions that the challenger has to beat.
        recorded: Version of the newest confirmed promotion since this challenger was first promoted; None if there is
            no such promotion.
    """

    alias: VersionId | None
    rivals: tuple[VersionId, ...]
    recorded: VersionId | None = None


@dataclass
class Contest:
    """Comparison of one challenger with the champion, which is repeated if the champion's alias is moved meanwhile.

    The alias is set while this process holds a lock. The lock is checked right before and right after the alias is set.
    If the second check finds that the lock was lost, setting the alias may have replaced a champion that another
    process promoted meanwhile. Therefore the next round compares the challenger with all versions that were promoted in
    the meantime.

    Attributes:
        rivals: Versions that were evaluated so far.
        against: Version with which the last round compared the challenger.
        decision: Decision of the last round.
        written: Versions to which this process has given the alias.
        since: Id of the ledger's row about the first promotion by this process. None: this process has promoted no
            version yet.
    """

    client: MlflowClient
    ledger: Ledger
    register: Register
    challenger: Candidate
    baseline: Baseline | None
    holdout_digest: str
    key: Key
    score_champion: Callable[[VersionId], Candidate]
    rivals: dict[VersionId, Candidate] = field(default_factory=dict)
    against: Candidate | None = None
    decision: DecisionResult | None = None
    written: set[VersionId] = field(default_factory=set)
    since: int | None = None

    def decided(self) -> Outcome:
        """Promote the challenger if it is better than the champion, and return the outcome."""
        if (note := patiently(self.ledger.store, lambda: self.ledger.unmatched(self.client))) is not None:
            print(note, flush=True)
        while (outcome := patiently(self.ledger.store, self.round)) is None:
            pass
        return outcome

    def previewed(self) -> Outcome:
        """Compare the challenger with the present champion, and leave the alias where it is. The challenger waits for a
        decision."""
        rivals = self._standing(champion_of(self.client, self.register)).rivals
        found = self._unread(rivals) or self._outcome(self._decide(rivals))
        return replace(found, decision=waiting(self.register, self.challenger, found.decision))

    def round(self) -> Outcome | None:
        """Compare challenger and champion once, and give the champion's alias to the better version.

        Returns:
            The outcome; None if the alias changed or the lock was lost meanwhile, so that another round is needed.
        """
        standing = self._standing(champion_of(self.client, self.register))
        # The models are evaluated before the lock is taken, because the evaluation on a large holdout may take longer
        # than the lock is valid.
        if (unread := self._unread(standing.rivals)) is not None:
            return unread
        with store_lock(self.ledger.store, self.ledger.lock_name, PROMOTION_LOCK_TTL_S) as lock:
            alias = champion_of(self.client, self.register)
            if not self.ledger.settle(lock, alias):
                return None
            if (earlier := self._promoted_before(alias)) is not None:
                return earlier
            if self._standing(alias) != standing:
                return None
            self.decision = self._decide(standing.rivals)
            if self._moved_by_others(standing):
                return self._outcome(alias_moved(self.register, self.challenger, standing.alias))
            winner = self._winner(self.decision)
            wrong = winner != standing.alias or (self.written and winner != standing.recorded)
            if winner is not None and wrong and not self._set(lock, winner, standing.alias):
                return None
        return self._outcome(self.decision)

    def _outcome(self, decision: DecisionResult) -> Outcome:
        return Outcome(self.register.model, self.challenger, self.against, decision)

    def _unread(self, rivals: Sequence[VersionId]) -> Outcome | None:
        """Evaluate the rivals that are not evaluated yet. If one of them cannot be read, return the outcome: a champion
        that cannot be read is never replaced."""
        for version in rivals:
            if version not in self.rivals:
                try:
                    self.rivals[version] = self.score_champion(version)
                except UnreadChampionError as error:
                    self.against = Candidate(version, Evaluation(math.nan))
                    return self._outcome(champion_unread(self.register, self.challenger, version, str(error)))
        return None

    def _promoted_before(self, alias: VersionId | None) -> Outcome | None:
        """Return the outcome if the challenger has been promoted, but not by this process: by another process that
        promotes the same version, or by a person in MLflow."""
        if self.since is not None:
            return None
        mine, history = self.challenger.version, self.ledger.history()
        promotion = next((each for each in history if is_of(each, mine)), None)
        if promotion is None:
            return self._outcome(alias_moved(self.register, self.challenger, alias)) if alias == mine else None
        if alias != mine and not is_of(history[0], alias):
            # No recorded promotion has set the alias to its present version.
            return self._outcome(alias_moved(self.register, self.challenger, alias, when="after"))
        previous = promotion.previous
        if previous is not None:
            self.against = Candidate(VersionId.recorded(previous, promotion.previous_identity), Evaluation(math.nan))
        return self._outcome(promoted_before(self.register, self.challenger, previous))

    def _standing(self, alias: VersionId | None) -> _Standing:
        if self.since is None:
            return _Standing(alias, () if alias is None else (alias,))
        promoted = self.ledger.confirmed(self.since)
        rivals = tuple(each for each in dict.fromkeys(promoted) if each != self.challenger.version)
        return _Standing(alias, rivals, promoted[0] if promoted else None)

    def _moved_by_others(self, standing: _Standing) -> bool:
        """Return whether a person moved the champion's alias after this process had set it.

        A person has moved the alias if the alias points to a version that neither this process nor a recorded promotion
        has chosen.
        """
        return self.since is not None and standing.alias not in self.written | {standing.recorded}

    def _decide(self, rivals: Sequence[VersionId]) -> DecisionResult:
        """Decide whether the challenger is promoted, by a comparison with the best of the versions that it has to beat.

        If this process has already promoted the challenger, and no other version was promoted later, the earlier
        decision is kept.
        """
        if self.decision is not None and self.since is not None and not rivals:
            return self.decision
        candidates = [self.rivals[version] for version in rivals]
        self.against = strongest(candidates, self.challenger, self.register)
        return decide(self.register, self.challenger, self.against, self.baseline)

    def _winner(self, decision: DecisionResult) -> VersionId | None:
        if decision.promote:
            return self.challenger.version
        return None if self.against is None else self.against.version

    def _set(self, lock: HeldLock, winner: VersionId, previous: VersionId | None) -> bool:
        """Give the champion's alias to a version in MLflow, and record the promotion in the store.

        Returns:
            False if the lock was lost, or if the alias does not point to the version afterwards.
        """
        value = (self.challenger if winner == self.challenger.version else self.rivals[winner]).value
        intended = self.ledger.intend(
            lock,
            Promotion(
                registry_uri=self.ledger.registry,
                model=self.ledger.model,
                alias=self.ledger.alias,
                version=winner.number,
                version_identity=winner.columns,
                previous=previous and previous.number,
                previous_identity=previous and previous.columns,
                metric=self.register.metric,
                value=value if math.isfinite(value) else None,
                holdout_digest=self.holdout_digest,
                job_id=self.key.job_id,
                attempt=self.key.attempt,
                state=PromotionState.INTENDED,
                created_at=time.time(),
            ),
        )
        if intended is None:
            return False
        self.since = self.since or intended
        self.written.add(winner)
        with act(JobStep.PROMOTE):
            self.client.set_registered_model_alias(self.register.model, self.register.alias, winner.number)
        return champion_of(self.client, self.register) == winner and self.ledger.confirm(lock, intended)


def logged_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the values of a model's metrics, by their names in MLflow: ``holdout-<metric>``."""
    return {metric_name("holdout", name): value for name, value in evaluation.metrics.items()}


def champion_of(client: MlflowClient, register: Register) -> VersionId | None:
    """Return the version to which the champion's alias points in MLflow's registry; None if there is no such alias."""
    number = aliases_of(client.get_registered_model(register.model)).get(register.alias)
    return None if number is None else VersionId.read(client, register.model, number)


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
    teams.require_for_version(store, key, holder)
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
