"""Evaluate a model and the champion on the holdout, and give the champion's alias to the better one, under a lock."""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import JobError, RegistryError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import HeldLock, JobStep, act, patiently, store_lock
from shoal.jobs.mlflow_run import Run
from shoal.jobs.register import Register
from shoal.jobs.results import ChampionResult, DecisionResult, RecentVersion, finite
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.lazy_imports import mlflow
from shoal.models import comparison_report, loading, training_record
from shoal.models import decision as decisions
from shoal.models.holdout import Holdout, evaluate, on_common_keys, on_rows, on_unseen_rows
from shoal.models.ledger import AnotherRound, Ledger, is_of, promotions_of, version_of
from shoal.models.loading import Predictor
from shoal.models.registry import DECISION_TAG, REASON_TAG, VersionId, aliases_of, holdout_metrics, newest_versions
from shoal.models.training_record import Overlap, TrainingRows
from shoal.state.schema import Promotion, PromotionState
from shoal.training.reporting import HOLDOUT, metric_name

_HISTORY = 10
"""Number of earlier promotions that a report lists, and of earlier versions in a job's result."""


_AT_ONCE = 40
"""Versions to request in addition, because other jobs may have registered newer ones meanwhile."""


COLUMNS_TAG = "shoal.input_cols"
"""Name of the tag that contains the input columns of a registered version as a JSON list. Only a version whose
signature does not name the columns has this tag."""


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
        drift: Columns whose values differ most from the champion's training rows, and their PSI.
    """

    model: str
    challenger: decisions.Candidate
    champion: decisions.Candidate | None
    decision: DecisionResult
    recent: tuple[RecentVersion, ...] = ()
    drift: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the values of the challenger's metrics, as `holdout_named`."""
        return holdout_named(self.challenger.evaluation.metrics)

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
            "drift": self.drift,
        }


@contextmanager
def reading(register: Register, version: VersionId) -> Iterator[None]:
    """Convert an error in loading or evaluating the champion into an `UnreadChampionError`, except an outage of
    MLflow."""
    try:
        yield
    except RegistryError:
        raise
    except Exception as error:  # the champion may be of any program, and its code may raise any error
        raise UnreadChampionError(
            f"the champion models:/{register.model}/{version} cannot be evaluated on the holdout: "
            f"{str(error).strip() or type(error).__name__}. Correct register.holdout, or give the alias "
            f'"{register.alias}" to another version'
        ) from error


def load(register: Register, version: VersionId, input_cols: Sequence[str]) -> Predictor:
    """Load a registered version of the model, and return an object that predicts tables with it."""
    uri = f"models:/{register.model}/{version}"
    return loading.load(uri, input_cols, category_codes=register.category_codes)


def columns_of(
    client: mlflow.MlflowClient, register: Register, version: VersionId, input_cols: Sequence[str]
) -> Sequence[str]:
    """Return the input columns of a version that does not name its columns.

    If the version has no tag with its columns, the challenger's columns are returned, although they may be different.
    """
    listed = client.get_model_version(register.model, version.number).tags.get(COLUMNS_TAG)
    return json.loads(listed) if listed else input_cols


@dataclass(frozen=True)
class Challenge:
    """A model that was evaluated on the holdout, and may become the champion.

    Attributes:
        run: MLflow run in which the model was trained.
        register: Options with which the model is registered.
        holdout: Rows on which the models are compared.
        baseline: Metric of a constant prediction; None if the options ask for none.
        input_cols: Input columns of the model, if the model does not name them.
        trained_on: Rows that the model was trained on; empty if they are not known.
        overlap: Rows of the holdout that the model was trained on; None if that is not known.
        evaluation: The model's metrics on the holdout.
    """

    run: Run
    register: Register
    holdout: Holdout
    baseline: decisions.Baseline | None
    input_cols: Sequence[str]
    trained_on: TrainingRows
    overlap: Overlap | None
    evaluation: decisions.Evaluation

    @classmethod
    def of(
        cls,
        run: Run,
        register: Register,
        model: Predictor,
        holdout: Holdout,
        *,
        input_cols: Sequence[str] = (),
        trained_on: TrainingRows | None = None,
    ) -> Challenge:
        """Evaluate a model on the holdout.

        Raises:
            DataError: The holdout lacks a column that the model needs.
        """
        rows = trained_on or TrainingRows()
        overlap = _overlap(rows if rows.files else None, holdout)
        evaluation = evaluate(model, holdout, register.all_metrics, overlap=overlap)
        unknown = None if evaluation.predictions is None else evaluation.predictions.unknown
        known = holdout if unknown is None else holdout.part(~unknown)
        baseline = known.baseline(register) if len(known.labels) else None
        return cls(run, register, holdout, baseline, input_cols, rows, overlap, evaluation)

    def contest(self, ledger: Ledger, challenger: decisions.Candidate, key: Key) -> Contest:
        """Return the comparison of the model's registered version with the champion."""
        digest = self.holdout.connector.digest()
        return Contest(
            self.run.client, ledger, self.register, challenger, self.baseline, digest, key, self._score_champion
        )

    def reported(self, outcome: Outcome, ledger: Ledger, *, say: Callable[[str], object]) -> Outcome:
        """Pass the report of the comparison to `say`, and store it in the MLflow run and in the version's tags.

        Returns:
            The outcome, with the earlier versions of the model.
        """
        number = outcome.challenger.version.number
        # The promotion is complete, so an error is only printed.
        try:
            for name, value in ((REASON_TAG, outcome.decision.reason), (DECISION_TAG, outcome.decision.sentence)):
                self.run.client.set_model_version_tag(self.register.model, number, name, value)
            built = comparison_report.build(
                self.register,
                outcome.decision,
                outcome.challenger,
                outcome.champion,
                self.baseline,
                self.holdout,
                ledger.history()[:_HISTORY],
            )
            say(comparison_report.markdown(built))
            comparison_report.store(self.run, built)
        except Exception as error:
            say(f"{outcome.decision.sentence}\nthe report could not be stored in MLflow: {error}")
        try:
            return replace(outcome, recent=_recent(self.run.client, ledger, self.register, number))
        except Exception as error:
            # The earlier versions are only shown in messages, so the job must not fail because they cannot be read.
            say(f"the earlier versions of the model could not be read from MLflow: {error}")
            return outcome

    def _score_champion(self, version: VersionId) -> decisions.Candidate:
        """Evaluate a registered version, and compare it with the model on the rows that neither was trained on."""
        register, holdout, names = self.register, self.holdout, self.register.all_metrics
        columns = columns_of(self.run.client, register, version, self.input_cols)
        rows = training_record.load_rows(self.run, register.model, version.number)
        overlap = _overlap(rows, holdout)
        with reading(register, version):
            measured = evaluate(load(register, version, columns), holdout, names, overlap=overlap)
        mine, theirs = self.evaluation.predictions, measured.predictions
        assert mine is not None and theirs is not None
        keys, common = None, None
        if found := on_common_keys(mine, theirs, holdout, names):
            keys, common = found
            with reading(register, version):
                there = on_rows(theirs, holdout, names, keys, defined=math.isfinite(common.challenger.value))
            measured = replace(there, overlap=measured.overlap, period=measured.period)
        known = ((rows, overlap), (self.trained_on, self.overlap))
        seen = [training_record.seen_rows(each, holdout.connector, shared) for each, shared in known if each and shared]
        if not seen and register.late_run != "keep":
            return decisions.Candidate(version, measured, common=common)
        unseen = None
        if seen:
            either = functools.reduce(operator.or_, seen)
            unseen = on_unseen_rows(mine, theirs, holdout, names, either, keys)
        recency = training_record.recency(rows or TrainingRows(), self.trained_on, holdout.connector, holdout.time_col)
        return decisions.Candidate(version, measured, unseen, common, recency)


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

    client: mlflow.MlflowClient
    ledger: Ledger
    register: Register
    challenger: decisions.Candidate
    baseline: decisions.Baseline | None
    holdout_digest: str
    key: Key
    score_champion: Callable[[VersionId], decisions.Candidate]
    rivals: dict[VersionId, decisions.Candidate] = field(default_factory=dict)
    against: decisions.Candidate | None = None
    decision: DecisionResult | None = None
    written: set[VersionId] = field(default_factory=set)
    since: int | None = None

    def decided(self) -> Outcome:
        """Promote the challenger if it is better than the champion, and return the outcome."""
        if (note := patiently(self.ledger.store, lambda: self.ledger.unmatched(self.client))) is not None:
            print(note, flush=True)
        while True:
            with suppress(AnotherRound):
                return patiently(self.ledger.store, self.round)

    def previewed(self) -> Outcome:
        """Compare the challenger with the present champion, and leave the alias where it is. The challenger waits for a
        decision."""
        rivals = self._standing(champion_of(self.client, self.register)).rivals
        found = self._unread(rivals) or self._outcome(self._decide(rivals))
        return replace(found, decision=decisions.waiting(self.register, self.challenger, found.decision))

    def round(self) -> Outcome:
        """Compare challenger and champion once, and give the champion's alias to the better version.

        Raises:
            AnotherRound: The alias changed or the lock was lost meanwhile.
        """
        standing = self._standing(champion_of(self.client, self.register))
        # The models are evaluated before the lock is taken, because the evaluation on a large holdout may take longer
        # than the lock is valid.
        if (unread := self._unread(standing.rivals)) is not None:
            return unread
        with store_lock(self.ledger.store, self.ledger.lock_name, PROMOTION_LOCK_TTL_S) as lock:
            alias = champion_of(self.client, self.register)
            self.ledger.settle(lock, alias)
            if (earlier := self._promoted_before(alias)) is not None:
                return earlier
            if self._standing(alias) != standing:
                raise AnotherRound
            self.decision = self._decide(standing.rivals)
            # A person has moved the alias if it points to a version that neither this process nor a recorded promotion
            # has chosen.
            if self.since is not None and standing.alias not in self.written | {standing.recorded}:
                return self._outcome(decisions.alias_moved(self.register, self.challenger, standing.alias))
            winner = None if self.against is None else self.against.version
            if self.decision.promote:
                winner = self.challenger.version
            wrong = winner != standing.alias or (self.written and winner != standing.recorded)
            if winner is not None and wrong:
                self._set(lock, winner, standing.alias)
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
                    self.against = decisions.Candidate(version, decisions.Evaluation(math.nan))
                    return self._outcome(decisions.champion_unread(self.register, self.challenger, version, str(error)))
        return None

    def _promoted_before(self, alias: VersionId | None) -> Outcome | None:
        """Return the outcome if the challenger has been promoted, but not by this process: by another process that
        promotes the same version, or by a person in MLflow."""
        if self.since is not None:
            return None
        mine, history = self.challenger.version, self.ledger.history()
        if (promotion := next((each for each in history if is_of(each, mine)), None)) is None:
            return (
                self._outcome(decisions.alias_moved(self.register, self.challenger, alias)) if alias == mine else None
            )
        if alias != mine and not is_of(history[0], alias):
            # No recorded promotion has set the alias to its present version.
            return self._outcome(decisions.alias_moved(self.register, self.challenger, alias, when="after"))
        previous = promotion.previous
        if previous is not None:
            self.against = decisions.Candidate(
                VersionId.recorded(previous, promotion.previous_identity), decisions.Evaluation(math.nan)
            )
        return self._outcome(decisions.promoted_before(self.register, self.challenger, previous))

    def _standing(self, alias: VersionId | None) -> _Standing:
        if self.since is None:
            return _Standing(alias, () if alias is None else (alias,))
        promoted = [version_of(each) for each in self.ledger.history() if each.id >= self.since]
        rivals = tuple(each for each in dict.fromkeys(promoted) if each != self.challenger.version)
        return _Standing(alias, rivals, promoted[0] if promoted else None)

    def _decide(self, rivals: Sequence[VersionId]) -> DecisionResult:
        """Decide whether the challenger is promoted, by a comparison with the best of the versions that it has to beat.

        If this process has already promoted the challenger, and no other version was promoted later, the earlier
        decision is kept.
        """
        if self.decision is not None and self.since is not None and not rivals:
            return self.decision
        candidates = [self.rivals[version] for version in rivals]
        self.against = decisions.strongest(candidates, self.challenger, self.register)
        return decisions.decide(self.register, self.challenger, self.against, self.baseline)

    def _set(self, lock: HeldLock, winner: VersionId, previous: VersionId | None) -> None:
        """Give the champion's alias to a version in MLflow, and record the promotion in the store.

        Raises:
            AnotherRound: The lock was lost, or the alias does not point to the version afterwards.
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
                value=finite(value),
                holdout_digest=self.holdout_digest,
                job_id=self.key.job_id,
                attempt=self.key.attempt,
                state=PromotionState.INTENDED,
                created_at=time.time(),
            ),
        )
        self.since = self.since or intended
        self.written.add(winner)
        with act(JobStep.PROMOTE):
            self.client.set_registered_model_alias(self.register.model, self.register.alias, winner.number)
        if champion_of(self.client, self.register) != winner:
            raise AnotherRound
        self.ledger.confirm(lock, intended)


def holdout_named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a model's metrics on the holdout, by their names in a job's result: ``holdout-<metric>``."""
    return {metric_name(HOLDOUT, name): value for name, value in metrics.items()}


def champion_of(client: mlflow.MlflowClient, register: Register) -> VersionId | None:
    """Return the version to which the champion's alias points in MLflow's registry; None if there is no such alias."""
    number = aliases_of(client.get_registered_model(register.model)).get(register.alias)
    return None if number is None else VersionId.read(client, register.model, number)


def _recent(client: mlflow.MlflowClient, ledger: Ledger, register: Register, version: str) -> tuple[RecentVersion, ...]:
    """Return the last ten versions that were registered before the given version, the newest first."""
    found = newest_versions(client, register.model, _HISTORY + _AT_ONCE)
    promotions = ledger.history()
    earlier = [each for each in found if int(each.version) < int(version)][:_HISTORY]
    return tuple(
        RecentVersion(
            version=str(each.version),
            value=holdout_metrics(each.tags)[1].get(register.metric),
            promoted=bool(promotions_of(VersionId.of(each), promotions)),
        )
        for each in earlier
    )


def _overlap(trained_on: TrainingRows | None, holdout: Holdout) -> Overlap | None:
    """Find the holdout rows that are also training rows of a model; return None if the training rows are not known."""
    return None if trained_on is None else training_record.compare(trained_on, holdout.connector, holdout.time_col)
