"""Compare a new model (the challenger) with the champion on the same held-out rows, and promote the better model.

The champion is the registered version that has the alias.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError, RegistryError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.locks import HeldLock, store_lock
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.journal.store_outages import patiently
from shoal.jobs.metrics.evaluation import check_output
from shoal.jobs.mlflow import comparison_report, holdout_evaluation, model_loading, training_rows
from shoal.jobs.mlflow.holdout import Holdout
from shoal.jobs.mlflow.job_run import Run, legal_name, metric_name
from shoal.jobs.mlflow.model_loading import Predictor
from shoal.jobs.mlflow.promotion_decision import (
    Baseline,
    Candidate,
    Evaluation,
    alias_moved,
    champion_unread,
    decide,
    strongest,
)
from shoal.jobs.mlflow.promotion_history import Ledger
from shoal.jobs.mlflow.registry import (
    ALIAS_TAG,
    DECISION_TAG,
    REASON_TAG,
    aliases_of,
    answering,
    digest_tag,
    holdout_metrics,
    metric_tag,
    missing_ignored,
    newest_versions,
)
from shoal.jobs.mlflow.training_rows import Overlap, TrainingRows
from shoal.jobs.results import ChampionResult, DecisionResult, RecentVersion
from shoal.jobs.specs.register import Register
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState
from shoal.training.boosting.prediction import Output

if TYPE_CHECKING:
    from mlflow import MlflowClient

_HISTORY = 10
"""Number of earlier promotions that a report lists, and of earlier versions in a job's result."""

_AT_ONCE = 40
"""Versions to request in addition, because other jobs may have registered newer ones meanwhile."""

_COLUMNS = "shoal.input_cols"
"""Name of the tag that contains the input columns of a registered version as a JSON list. Only a version whose
signature does not name the columns has this tag."""


@dataclass(frozen=True)
class Outcome:
    """Result of the comparison of a challenger with the champion, and of the promotion if the challenger is better.

    Attributes:
        challenger: The new version in the registry, with its metrics on the holdout.
        champion: Version that the challenger was compared with; None if the alias pointed to no version.
        decision: Whether the challenger was given the alias, and why.
        recent: Versions that were registered before the challenger, the newest first.
    """

    challenger: Candidate
    champion: Candidate | None
    decision: DecisionResult
    recent: tuple[RecentVersion, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Return the values of the challenger's metrics, by their names in MLflow: ``holdout-<metric>``."""
        return _holdout_metrics(self.challenger.evaluation)

    def result(self) -> dict[str, Any]:
        """Return the fields of a job's result that say whether the new model was promoted, and why."""
        champion = self.champion and ChampionResult(version=self.champion.version, value=self.champion.value)
        return {
            "model_version": self.challenger.version,
            "promoted": self.decision.promote,
            "champion": champion,
            "decision": self.decision,
            "recent": self.recent,
        }


def try_champion(run: Run, register: Register, input_cols: Sequence[str] = ()) -> None:
    """Check before the training that the champion can be compared later: load it, and predict rows of the holdout.

    Raises:
        JobError: The champion cannot be loaded, or cannot predict the holdout.
        RegistryError: MLflow cannot be reached.
    """
    version, columns = None, input_cols
    with answering(run.uri), missing_ignored():
        version = _champion(run.client, register)
        if version is not None:
            columns = _columns_of(run.client, register, version, input_cols)
    if version is None:
        return
    holdout = DataConnector.from_spec(register.holdout)
    with _reading(register, version):
        champion = _load(register, version, columns)
        holdout_evaluation.try_out(champion, holdout, register.metric)


def try_challenger(register: Register, output: Output) -> None:
    """Check before the training that the metric that decides can be computed from the challenger's predictions.

    Raises:
        InvalidArgumentError: The predictions do not suit the metric.
    """
    try:
        check_output(
            register.metric,
            output.values,
            output.classes,
            gives_classes=output.gives_classes,
            is_unbounded=output.is_unbounded,
        )
    except DataError as error:
        raise InvalidArgumentError(
            f'register.metric "{register.metric}" does not suit the objective ({output.objective}): {error}'
        ) from error


class _UnreadError(JobError):
    """The champion cannot be loaded, or cannot predict the holdout."""


@contextmanager
def _reading(register: Register, version: str) -> Iterator[None]:
    """Convert an error in loading or evaluating the champion into an `_UnreadError`, except an outage of MLflow."""
    try:
        yield
    except RegistryError:
        raise
    except Exception as error:  # the champion may be of any program, and its code may raise any error
        raise _UnreadError(
            f"the champion models:/{register.model}/{version} cannot be evaluated on the holdout: "
            f"{str(error).strip() or type(error).__name__}. Correct register.holdout, or give the alias "
            f'"{register.alias}" to another version'
        ) from error


def _load(register: Register, version: str, input_cols: Sequence[str]) -> Predictor:
    uri = f"models:/{register.model}/{version}"
    return model_loading.load(uri, input_cols, category_codes=register.category_codes)


def _columns_of(client: MlflowClient, register: Register, version: str, input_cols: Sequence[str]) -> Sequence[str]:
    """Return the input columns of a version that does not name its columns.

    If the version has no tag with its columns, the challenger's columns are returned, although they may be different.
    """
    listed = client.get_model_version(register.model, version).tags.get(_COLUMNS)
    return json.loads(listed) if listed else input_cols


def enter(
    store: Store,
    key: Key,
    run: Run,
    register: Register,
    *,
    is_current: Callable[[], bool],
    tags: Mapping[str, str],
    model_uri: str,
    model: Predictor,
    label_col: str,
    input_cols: Sequence[str] = (),
    group_col: str | None = None,
    trained_on: TrainingRows | None = None,
) -> Outcome:
    """Evaluate and register a model, and promote the model if it is better than the champion on the holdout.

    A report of the comparison is printed and stored in the MLflow run.

    Raises:
        DataError: The holdout lacks a column that the model needs, or has a null label.
        JobError: This attempt has ended or was replaced by a newer attempt.
        RegistryError: MLflow cannot be reached.
    """
    if not is_current():
        raise JobError(
            f'the model of attempt {key.attempt} of job "{key.job_id}" is not registered, '
            "because the attempt has ended or a newer attempt of the job has replaced it"
        )
    holdout = Holdout.read(register, label_col, group_col)

    def score_champion(version: str) -> Candidate:
        columns = _columns_of(run.client, register, version, input_cols)
        rows = training_rows.load(run, register.model, version)
        seen = _overlap(rows, holdout)
        with _reading(register, version):
            champion = _load(register, version, columns)
            measured = holdout_evaluation.evaluate(champion, holdout, register.all_metrics, overlap=seen)
        return _rival(version, measured, [(rows, seen), (trained_on, overlap)], evaluation, holdout, register)

    trained_on = trained_on or TrainingRows()
    overlap = _overlap(trained_on if trained_on.files else None, holdout)
    evaluation = holdout_evaluation.evaluate(model, holdout, register.all_metrics, overlap=overlap)
    run.log_values(_holdout_metrics(evaluation))
    baseline = holdout.baseline(register)
    columns = {_COLUMNS: json.dumps(list(input_cols))} if input_cols else {}
    ledger = Ledger.of(run.client, store, register)
    digest, tags = holdout.connector.digest(), {**tags, **columns, **training_rows.store(run, trained_on)}
    challenger = registered(register, model_uri, evaluation, digest, tags)
    outcome = Contest(run.client, ledger, register, challenger, baseline, digest, key, score_champion).decided()
    _report(run, register, outcome, baseline, holdout, ledger)
    try:
        return replace(outcome, recent=_recent(run.client, ledger, register, outcome.challenger.version))
    except Exception as error:
        # The earlier versions are only shown in messages, so the job must not fail because they cannot be read.
        print(f"the earlier versions of the model could not be read from MLflow: {error}", flush=True)
        return outcome


def _report(
    run: Run, register: Register, outcome: Outcome, baseline: Baseline | None, holdout: Holdout, ledger: Ledger
) -> None:
    """Print the report of a comparison, and store it in the MLflow run. The promotion is complete, so an error is only
    printed."""
    try:
        tags = {REASON_TAG: outcome.decision.reason, DECISION_TAG: outcome.decision.sentence}
        for name, value in tags.items():
            run.client.set_model_version_tag(register.model, outcome.challenger.version, name, value)
        built = comparison_report.build(
            register,
            outcome.decision,
            outcome.challenger,
            outcome.champion,
            baseline,
            holdout,
            ledger.history()[:_HISTORY],
        )
        print(comparison_report.markdown(built), flush=True)
        comparison_report.store(run, built)
    except Exception as error:
        print(f"{outcome.decision.sentence}\nthe report could not be stored in MLflow: {error}", flush=True)


def registered(
    register: Register, model_uri: str, evaluation: Evaluation, holdout_digest: str, tags: Mapping[str, str]
) -> Candidate:
    """Register an evaluated model as a new version."""
    import mlflow

    measured = {metric_tag(name): repr(value) for name, value in evaluation.metrics.items()}
    tagged = {**measured, digest_tag(register.metric): holdout_digest, ALIAS_TAG: register.alias}
    version = mlflow.register_model(model_uri, register.model, tags={**tags, **tagged})
    return Candidate(str(version.version), evaluation)


def _holdout_metrics(evaluation: Evaluation) -> dict[str, float]:
    return {metric_name("holdout", name): value for name, value in evaluation.metrics.items()}


def _recent(client: MlflowClient, ledger: Ledger, register: Register, version: str) -> tuple[RecentVersion, ...]:
    """Return the last ten versions that were registered before the given version, the newest first."""
    found = newest_versions(client, register.model, _HISTORY + _AT_ONCE)
    promoted, metric = set(ledger.confirmed()), legal_name(register.metric)
    earlier = [each for each in found if int(each.version) < int(version)][:_HISTORY]
    return tuple(
        RecentVersion(
            version=str(each.version),
            value=holdout_metrics(each.tags)[1].get(metric),
            promoted=str(each.version) in promoted,
        )
        for each in earlier
    )


def _overlap(trained_on: TrainingRows | None, holdout: Holdout) -> Overlap | None:
    """Find the holdout rows that are also training rows of a model; return None if the training rows are not known."""
    if trained_on is None:
        return None
    return training_rows.compare(trained_on, holdout.connector, holdout.time_col)


def _rival(
    version: str,
    measured: Evaluation,
    known: Sequence[tuple[TrainingRows | None, Overlap | None]],
    challenger: Evaluation,
    holdout: Holdout,
    register: Register,
) -> Candidate:
    """Return a registered version with its comparison with the challenger on the rows that neither was trained on."""
    seen = [training_rows.seen_rows(rows, holdout.connector, found) for rows, found in known if rows and found]
    rows, mine = (rows or TrainingRows() for rows, _ in known)
    if not seen and register.late_run != "keep":
        return Candidate(version, measured)
    unseen = None
    if seen:
        either = functools.reduce(operator.or_, seen)
        unseen = holdout_evaluation.on_unseen_rows(challenger, measured, holdout, register.all_metrics, either)
    recency = training_rows.recency(rows, mine, holdout.connector, holdout.time_col)
    return Candidate(version, measured, unseen, recency)


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

    alias: str | None
    rivals: tuple[str, ...]
    recorded: str | None = None


@dataclass
class Contest:
    """Comparison of one challenger with the champion, which is repeated if the champion's alias is moved meanwhile.

    The alias is set while this process holds a lock. The lock is checked right before and right after the alias is set.
    If the second check finds that the lock was lost, setting the alias may have replaced a champion that another
    process promoted meanwhile. Therefore the next round compares the challenger with all versions that were promoted in
    the meantime.

    Attributes:
        rivals: Versions that were evaluated so far, by version number.
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
    score_champion: Callable[[str], Candidate]
    rivals: dict[str, Candidate] = field(default_factory=dict)
    against: Candidate | None = None
    decision: DecisionResult | None = None
    written: set[str] = field(default_factory=set)
    since: int | None = None

    def decided(self) -> Outcome:
        """Promote the challenger if it is better than the champion, and return the outcome."""
        while (outcome := patiently(self.ledger.store, self.round)) is None:
            pass
        return outcome

    def round(self) -> Outcome | None:
        """Compare challenger and champion once, and give the champion's alias to the better version.

        Returns:
            The outcome; None if the alias changed or the lock was lost meanwhile, so that another round is needed.
        """
        standing = self._standing(_champion(self.client, self.register))
        # The models are evaluated before the lock is taken, because the evaluation on a large holdout may take longer
        # than the lock is valid.
        for version in standing.rivals:
            if version not in self.rivals:
                try:
                    self.rivals[version] = self.score_champion(version)
                except _UnreadError as error:
                    # The training is complete. A champion that cannot be read is never replaced.
                    unread = Candidate(version, Evaluation(math.nan))
                    decision = champion_unread(self.register, self.challenger, version, str(error))
                    return Outcome(self.challenger, unread, decision)
        with store_lock(self.ledger.store, self.ledger.lock_name, PROMOTION_LOCK_TTL_S) as lock:
            alias = _champion(self.client, self.register)
            if not self.ledger.settle(lock, alias) or self._standing(alias) != standing:
                return None
            self.decision = self._decide(standing.rivals)
            if self._moved_by_others(standing):
                return Outcome(
                    self.challenger, self.against, alias_moved(self.register, self.challenger, standing.alias)
                )
            winner = self._winner(self.decision)
            wrong = winner != standing.alias or (self.written and winner != standing.recorded)
            if winner is not None and wrong and not self._set(lock, winner, standing.alias):
                return None
        return Outcome(self.challenger, self.against, self.decision)

    def _standing(self, alias: str | None) -> _Standing:
        if self.since is None:
            return _Standing(alias, () if alias is None else (alias,))
        promoted = self.ledger.confirmed(self.since)
        rivals = tuple(sorted(set(promoted) - {self.challenger.version}))
        return _Standing(alias, rivals, promoted[0] if promoted else None)

    def _moved_by_others(self, standing: _Standing) -> bool:
        """Return whether a person moved the champion's alias after this process had set it.

        A person has moved the alias if the alias points to a version that neither this process nor a recorded promotion
        has chosen.
        """
        return self.since is not None and standing.alias not in self.written | {standing.recorded}

    def _decide(self, rivals: Sequence[str]) -> DecisionResult:
        """Decide whether the challenger is promoted, by a comparison with the best of the versions that it has to beat.

        If this process has already promoted the challenger, and no other version was promoted later, the earlier
        decision is kept.
        """
        if self.decision is not None and self.since is not None and not rivals:
            return self.decision
        candidates = [self.rivals[version] for version in rivals]
        self.against = strongest(candidates, self.challenger, self.register)
        return decide(self.register, self.challenger, self.against, self.baseline)

    def _winner(self, decision: DecisionResult) -> str | None:
        if decision.promote:
            return self.challenger.version
        return None if self.against is None else self.against.version

    def _set(self, lock: HeldLock, winner: str, previous: str | None) -> bool:
        """Give the champion's alias to a version in MLflow, and record the promotion in the store."""
        value = (self.challenger if winner == self.challenger.version else self.rivals[winner]).value
        intended = self.ledger.intend(
            lock,
            Promotion(
                registry_uri=self.ledger.registry,
                model=self.ledger.model,
                alias=self.ledger.alias,
                version=winner,
                previous=previous,
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
            self.client.set_registered_model_alias(self.register.model, self.register.alias, winner)
        return self.ledger.confirm(lock, intended)


def _champion(client: MlflowClient, register: Register) -> str | None:
    """Return the version to which the champion's alias points in MLflow's registry; None if there is no such alias."""
    return aliases_of(client.get_registered_model(register.model)).get(register.alias)
