"""Compare a new model (the challenger) with the champion on the same held-out rows, and promote the better model.

The champion is the registered version that has the alias.
"""

from __future__ import annotations

import functools
import json
import operator
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.data.connector import DataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError, RegistryError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import Run, legal_name
from shoal.jobs.register import Register
from shoal.jobs.results import RecentVersion
from shoal.models import comparison_report, loading, training_rows, waiting_version
from shoal.models.contest import Contest, Outcome, UnreadChampionError, champion_of, logged_metrics
from shoal.models.decision import Baseline, Candidate, Evaluation
from shoal.models.holdout import Holdout, evaluate, on_common_keys, on_rows, on_unseen_rows, try_out
from shoal.models.ledger import Ledger, promotions_of
from shoal.models.loading import Predictor
from shoal.models.metrics import check_output
from shoal.models.registry import (
    ALIAS_TAG,
    DECISION_TAG,
    REASON_TAG,
    VersionId,
    answering,
    digest_tag,
    holdout_metrics,
    metric_tag,
    missing_ignored,
    newest_versions,
)
from shoal.models.training_rows import Overlap, TrainingRows
from shoal.models.waiting_version import WaitingVersion
from shoal.state import Store
from shoal.training.boosting.library import Output

if TYPE_CHECKING:
    from mlflow import MlflowClient

_HISTORY = 10
"""Number of earlier promotions that a report lists, and of earlier versions in a job's result."""

_AT_ONCE = 40
"""Versions to request in addition, because other jobs may have registered newer ones meanwhile."""

_COLUMNS = "shoal.input_cols"
"""Name of the tag that contains the input columns of a registered version as a JSON list. Only a version whose
signature does not name the columns has this tag."""


def try_champion(run: Run, register: Register, input_cols: Sequence[str] = ()) -> None:
    """Check before the training that the champion can be compared later: load it, and predict rows of the holdout.

    Raises:
        JobError: The champion cannot be loaded, or cannot predict the holdout.
        RegistryError: MLflow cannot be reached.
    """
    version, columns = None, input_cols
    with answering(run.uri), missing_ignored():
        version = champion_of(run.client, register)
        if version is not None:
            columns = _columns_of(run.client, register, version, input_cols)
    if version is None:
        return
    holdout = DataConnector.from_spec(register.holdout)
    with _reading(register, version):
        champion = load(register, version, columns)
        try_out(champion, holdout, register.metric)


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


@contextmanager
def _reading(register: Register, version: VersionId) -> Iterator[None]:
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


def _columns_of(
    client: MlflowClient, register: Register, version: VersionId, input_cols: Sequence[str]
) -> Sequence[str]:
    """Return the input columns of a version that does not name its columns.

    If the version has no tag with its columns, the challenger's columns are returned, although they may be different.
    """
    listed = client.get_model_version(register.model, version.number).tags.get(_COLUMNS)
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
    baseline: Baseline | None
    input_cols: Sequence[str]
    trained_on: TrainingRows
    overlap: Overlap | None
    evaluation: Evaluation

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

    def contest(self, ledger: Ledger, challenger: Candidate, key: Key) -> Contest:
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
        self._report(outcome, ledger, say)
        try:
            version = outcome.challenger.version.number
            return replace(outcome, recent=_recent(self.run.client, ledger, self.register, version))
        except Exception as error:
            # The earlier versions are only shown in messages, so the job must not fail because they cannot be read.
            say(f"the earlier versions of the model could not be read from MLflow: {error}")
            return outcome

    def _score_champion(self, version: VersionId) -> Candidate:
        """Evaluate a registered version, and compare it with the model on the rows that neither was trained on."""
        register, holdout = self.register, self.holdout
        columns = _columns_of(self.run.client, register, version, self.input_cols)
        rows = training_rows.load(self.run, register.model, version.number)
        seen = _overlap(rows, holdout)
        with _reading(register, version):
            champion = load(register, version, columns)
            measured = evaluate(champion, holdout, register.all_metrics, overlap=seen)
        known = [(rows, seen), (self.trained_on, self.overlap)]
        return _rival(version, measured, known, self.evaluation, holdout, register)

    def _report(self, outcome: Outcome, ledger: Ledger, say: Callable[[str], object]) -> None:
        # The promotion is complete, so an error is only printed.
        try:
            tags = {REASON_TAG: outcome.decision.reason, DECISION_TAG: outcome.decision.sentence}
            number = outcome.challenger.version.number
            for name, value in tags.items():
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

    With ``promote=False`` in `register`, the model is compared with the champion and waits for a decision. A report of
    the comparison is printed and stored in the MLflow run.

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
    challenge = Challenge.of(run, register, model, holdout, input_cols=input_cols, trained_on=trained_on)
    run.log_values(logged_metrics(challenge.evaluation))
    columns = {_COLUMNS: json.dumps(list(input_cols))} if input_cols else {}
    digest = holdout.connector.digest()
    tags = {**tags, **columns, **training_rows.store(run, challenge.trained_on)}
    if not register.promote:
        record = WaitingVersion.of(register, digest, label_col, input_cols, group_col)
        tags |= waiting_version.store(run, record)
    challenger = registered(register, model_uri, challenge.evaluation, digest, tags)
    ledger = Ledger.of(run.client, store, register)
    contest = challenge.contest(ledger, challenger, key)
    outcome = contest.decided() if register.promote else contest.previewed()
    outcome = challenge.reported(outcome, ledger, say=_print)
    if not register.promote:
        _print(f"to promote it: shoal models promote {shlex.quote(register.model)} {challenger.version}")
    return outcome


def _print(text: str) -> None:
    print(text, flush=True)


def registered(
    register: Register, model_uri: str, evaluation: Evaluation, holdout_digest: str, tags: Mapping[str, str]
) -> Candidate:
    """Register an evaluated model as a new version."""
    import mlflow

    measured = {metric_tag(name): repr(value) for name, value in evaluation.metrics.items()}
    tagged = {**measured, digest_tag(register.metric): holdout_digest, ALIAS_TAG: register.alias}
    version = mlflow.register_model(model_uri, register.model, tags={**tags, **tagged})
    return Candidate(VersionId.of(version), evaluation)


def _recent(client: MlflowClient, ledger: Ledger, register: Register, version: str) -> tuple[RecentVersion, ...]:
    """Return the last ten versions that were registered before the given version, the newest first."""
    found = newest_versions(client, register.model, _HISTORY + _AT_ONCE)
    promotions, metric = ledger.history(), legal_name(register.metric)
    earlier = [each for each in found if int(each.version) < int(version)][:_HISTORY]
    return tuple(
        RecentVersion(
            version=str(each.version),
            value=holdout_metrics(each.tags)[1].get(metric),
            promoted=bool(promotions_of(VersionId.of(each), promotions)),
        )
        for each in earlier
    )


def _overlap(trained_on: TrainingRows | None, holdout: Holdout) -> Overlap | None:
    """Find the holdout rows that are also training rows of a model; return None if the training rows are not known."""
    if trained_on is None:
        return None
    return training_rows.compare(trained_on, holdout.connector, holdout.time_col)


def _rival(
    version: VersionId,
    measured: Evaluation,
    known: Sequence[tuple[TrainingRows | None, Overlap | None]],
    challenger: Evaluation,
    holdout: Holdout,
    register: Register,
) -> Candidate:
    """Return a registered version with its comparison with the challenger on the rows that neither was trained on."""
    mine, theirs = challenger.predictions, measured.predictions
    assert mine is not None and theirs is not None
    keys, common = None, None
    if found := on_common_keys(mine, theirs, holdout, register.all_metrics):
        keys, common = found
        on_keys = on_rows(theirs, holdout, register.all_metrics, keys)
        measured = replace(on_keys, overlap=measured.overlap, period=measured.period)
    seen = [training_rows.seen_rows(rows, holdout.connector, found) for rows, found in known if rows and found]
    champion_rows, own_rows = (rows or TrainingRows() for rows, _ in known)
    if not seen and register.late_run != "keep":
        return Candidate(version, measured, common=common)
    unseen = None
    if seen:
        either = functools.reduce(operator.or_, seen)
        unseen = on_unseen_rows(mine, theirs, holdout, register.all_metrics, either, keys)
    recency = training_rows.recency(champion_rows, own_rows, holdout.connector, holdout.time_col)
    return Candidate(version, measured, unseen, common, recency)
