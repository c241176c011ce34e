"""Compare a new model (the challenger) with the champion on the same held-out rows, and promote the better model.

The champion is the registered version that has the alias.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, get_args

from shoal.data.connector import DataConnector
from shoal.data.syntax import connection_variable
from shoal.errors import DataError, InvalidArgumentError, JobError, ModelNotFoundError, RegistryError, shown
from shoal.jobs import credentials, teams
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import Run, legal_name, metric_name, tracking_at, uri_of
from shoal.jobs.results import PROMOTING, WAITING, DecisionResult, JobResult, PromotionResult, Reason, RecentVersion
from shoal.jobs.specs.register import DEFAULT_ALIAS, Register
from shoal.models import comparison_report, loading, training_record
from shoal.models.catalog import unknown_model
from shoal.models.contest import Contest, Outcome, UnreadChampionError, champion_of, logged_metrics
from shoal.models.decision import Baseline, Candidate, Evaluation
from shoal.models.holdout import Holdout, evaluate, on_common_keys, on_rows, on_unseen_rows, try_out
from shoal.models.ledger import Ledger, promotions_of
from shoal.models.loading import Predictor
from shoal.models.metrics import check_output
from shoal.models.registry import (
    ALIAS_TAG,
    ATTEMPT_TAG,
    DECISION_TAG,
    JOB_TAG,
    REASON_TAG,
    Registry,
    VersionId,
    answering,
    digest_tag,
    holdout_metrics,
    is_missing,
    is_ours,
    is_unreachable,
    metric_tag,
    missing_ignored,
    newest_versions,
)
from shoal.models.training_record import Overlap, TrainingRows
from shoal.pool.holder import python_holder
from shoal.redaction import HIDDEN, redact_all
from shoal.state import Store
from shoal.training.boosting.prediction import Output

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


WAITING_TAG = "shoal.waiting_version"
"""Name of the tag that contains the URI of the record of a registered version that waits, or has waited."""

_WAITING_FOLDER = "shoal/waiting_version"


@dataclass(frozen=True)
class WaitingVersion:
    """Record of a registered version that waits until `promote_model` is called.

    Attributes:
        register: Options with which the version was registered, without credentials.
        holdout_digest: Digest of the rows of the holdout.
        label_col: Column with the labels.
        input_cols: Input columns of the model, if the model does not name them.
        group_col: Column with the groups of a ranking metric; None if there is none.
    """

    register: Mapping[str, Any]
    holdout_digest: str
    label_col: str
    input_cols: Sequence[str] = ()
    group_col: str | None = None

    @classmethod
    def of(
        cls, register: Register, holdout_digest: str, label_col: str, input_cols: Sequence[str], group_col: str | None
    ) -> Self:
        """Make the record of a version that is about to be registered."""
        # A query of the holdout runs again at the promotion: the files with its rows are removed when the job ends.
        if register.holdout.sql is not None:
            holdout = register.holdout.model_copy(update={"paths": (), "staging": None})
            register = register.model_copy(update={"holdout": holdout})
        # The options of a training function have further fields, which are among the arguments.
        options = redact_all(register.model_dump(mode="json", include=set(Register.model_fields)))
        return cls(options, holdout_digest, label_col, tuple(input_cols), group_col)

    def options(self) -> Register:
        """Return the options with which the version was registered."""
        return Register.parse(self.register)


def store_waiting(run: Run, record: WaitingVersion) -> dict[str, str]:
    """Store a record in the MLflow run, and return the tags that mark the version as waiting."""
    text = json.dumps(asdict(record))
    path = f"{_WAITING_FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    run.client.log_text(run.run_id, text, path)
    return {WAITING_TAG: f"runs:/{run.run_id}/{path}", REASON_TAG: WAITING}


def load_waiting(version: ModelVersion) -> WaitingVersion:
    """Load the record of a registered version.

    Raises:
        InvalidArgumentError: The version has no record: it has never waited for a decision.
        JobError: The record cannot be read.
    """
    import mlflow

    name, uri = f"{version.name} version {version.version}", version.tags.get(WAITING_TAG)
    if uri is None:
        raise InvalidArgumentError(
            f"{name} does not wait for a decision: only a job with register.promote=false registers such a version"
        )
    try:
        return WaitingVersion(**json.loads(mlflow.artifacts.load_text(uri)))
    except Exception as error:
        if is_unreachable(error):
            raise
        raise JobError(
            f"{name} cannot be promoted, because its rules and its holdout in {uri} cannot be read: "
            f"{str(error).strip() or type(error).__name__}. Train the model again, or set the alias in MLflow"
        ) from error


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
        rows = training_record.load_rows(self.run, register.model, version.number)
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
    tags = {**tags, **columns, **training_record.store_rows(run, challenge.trained_on)}
    if not register.promote:
        record = WaitingVersion.of(register, digest, label_col, input_cols, group_col)
        tags |= store_waiting(run, record)
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
    return training_record.compare(trained_on, holdout.connector, holdout.time_col)


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
    seen = [training_record.seen_rows(rows, holdout.connector, found) for rows, found in known if rows and found]
    champion_rows, own_rows = (rows or TrainingRows() for rows, _ in known)
    if not seen and register.late_run != "keep":
        return Candidate(version, measured, common=common)
    unseen = None
    if seen:
        either = functools.reduce(operator.or_, seen)
        unseen = on_unseen_rows(mine, theirs, holdout, register.all_metrics, either, keys)
    recency = training_record.recency(champion_rows, own_rows, holdout.connector, holdout.time_col)
    return Candidate(version, measured, unseen, common, recency)


Training = JobResult | Mapping[str, Any] | str
"""A training that has registered a version: the job's result, the result as a dict, or the id of the job."""


def promote_model(
    model: str | None = None,
    version: str | int | None = None,
    *,
    training: Training | None = None,
    tracking_uri: str | None = None,
    holder: str | None = None,
    connection_url: Callable[[str], str | None] | None = None,
    on_log: Callable[[str], object] = print,
) -> PromotionResult:
    """Promote a version that waits for a decision, if it is better than the champion.

    A job with ``register.promote=False`` registers such a version. The version is compared with the champion of this
    moment, by the rules and on the holdout of the job, and under the lock that all promotions take. If it is not
    better, the champion stays. If it was decided about before, nothing changes, and the earlier decision is returned.

    The comparison runs in this process, which needs the library of the model, the holdout, MLflow and the store.

    Args:
        model: Name of the registered model, together with `version`; instead of `training`.
        version: Version number.
        training: The `JobResult` of the training, the result as a dict, or the id of the job.
        tracking_uri: URI of the MLflow server or database. None: that of the job if `training` is given, the
            environment variable MLFLOW_TRACKING_URI, or else the database in `$SHOAL_HOME`.
        holder: Name of the user or run that promotes, for the record of actions. None: this process.
        connection_url: Function that returns the SQLAlchemy URL of a database connection by its name, as in `submit`.
            It is needed only if a query selects the rows of the holdout.
        on_log: Function that takes the report of the comparison.

    Raises:
        InvalidArgumentError: The arguments do not name one version, or the version does not wait for a decision.
        ModelNotFoundError: The version does not exist, or was deleted.
        TeamError: The job that has registered the version belongs to another team.
        DataError: The holdout has changed since the version was registered, or cannot be read.
        JobError: The version, its record in MLflow or the champion cannot be read.
        RegistryError: MLflow cannot be used.
        MissingExtraError: MLflow or the library of the model is not installed.

    Example:
        >>> promote_model("delays", 3).promoted
        >>> promote_model(training=result).decision.sentence
    """
    name, number, job_id, is_own = _named(model, version, training)
    uri = uri_of(tracking_uri or (job_id and _tracking_uri_of(job_id)))
    registry = Registry.open(uri)
    if registry is None:
        raise ModelNotFoundError(f"the model {shown(name)} does not exist: no job has registered a model yet")
    with tracking_at(uri):
        with answering(registry.uri):
            found = _version(registry, name, number)
            if is_own and found.tags[JOB_TAG] != job_id:
                raise _is_of_another_job(found, job_id)
            if (earlier := _decided_before(found)) is not None:
                on_log(f"decided before, so nothing changes: {earlier.decision.sentence}")
                return earlier
            holder = holder or python_holder()
            teams.require_for_version(Store(), _key_of(found), holder)
            record = load_waiting(found)
        run = Run(registry.client, uri, "", found.run_id or "", "")
        with _present_holdout(record.options(), connection_url) as register:
            holdout = _read(found, register, record)
            with answering(registry.uri):
                ledger = Ledger.of(registry.client, Store(), register, holder)
                outcome = _decide(run, ledger, found, register, record, holdout, on_log)
                return _result(found, register, outcome)


def _decide(
    run: Run,
    ledger: Ledger,
    version: ModelVersion,
    register: Register,
    record: WaitingVersion,
    holdout: Holdout,
    on_log: Callable[[str], object],
) -> Outcome:
    """Evaluate a version on the holdout, promote it if it is better than the champion, and report the decision."""
    mine = VersionId.of(version)
    challenge = Challenge.of(
        run,
        register,
        load(register, mine, record.input_cols),
        holdout,
        input_cols=record.input_cols,
        trained_on=training_record.load_rows(run, version.name, mine.number),
    )
    outcome = challenge.contest(ledger, Candidate(mine, challenge.evaluation), _key_of(version)).decided()
    if outcome.decision.reason == "champion_unread":
        # This is no decision about the version: another process may have the library of the champion.
        raise JobError(outcome.decision.sentence)
    return challenge.reported(outcome, ledger, say=on_log)


def _read(version: ModelVersion, register: Register, record: WaitingVersion) -> Holdout:
    """Read the holdout of a version, which must have the rows with which the version was registered."""
    holdout = Holdout.read(register, record.label_col, record.group_col)
    if holdout.connector.digest() != record.holdout_digest:
        raise DataError(
            f"{version.name} version {version.version} is not promoted: its holdout has changed since it was "
            "registered. Restore the rows of the holdout, or train the model again"
        )
    return holdout


def _named(
    model: str | None, version: str | int | None, training: Training | None
) -> tuple[str, str, str | None, bool]:
    """Return name and number of the version that the arguments of `promote_model` name, the id of a job if they name
    one, and whether this job has registered the version."""
    if training is None:
        if model is None or version is None:
            raise InvalidArgumentError(
                "no version is named: give both model and version, or the result of a training that has registered one"
            )
        number = str(version)
        if not number.isdigit():
            raise InvalidArgumentError(f"version={shown(version)} is not legal: it must be a number, such as 3")
        return model, number, None, False
    if model is not None or version is not None:
        raise InvalidArgumentError("training is given together with model or version: give only one of both")
    # The result of a task that does not wait for its job has only the job's id.
    if isinstance(training, Mapping) and "model_uri" not in training and isinstance(training.get("job_id"), str):
        training = str(training["job_id"])
    if isinstance(training, str):
        training = _result_of_job(training)
    result = training if isinstance(training, JobResult) else JobResult.parse(training)
    if result.model_name is None or result.model_version is None:
        raise InvalidArgumentError(
            f"job {result.job_id} has registered no model, so there is no version to promote: set register in its spec"
        )
    return result.model_name, result.model_version, result.job_id, result.skipped is None


def _result_of_job(job_id: str) -> Mapping[str, Any]:
    job = attempts.latest(Store(), job_id)
    if job.result is None:
        raise InvalidArgumentError(
            f"job {job_id} is {job.state.value} and has no result, so there is no version to promote"
        )
    return job.result


def _tracking_uri_of(job_id: str) -> str | None:
    """Return the tracking URI that a job has used; None if the store does not have it, or had to hide its password.

    All promotions of a model have to use the same URI, because the lock and the records of promotions belong to it.
    """
    job = attempts.find_latest(Store(), job_id)
    uri: str | None = ((job.spec.get("tracking") if job else None) or {}).get("uri")
    return None if uri is None or HIDDEN in uri else uri


def _version(registry: Registry, name: str, number: str) -> ModelVersion:
    """Return a version that a job has registered."""
    import mlflow

    try:
        found = registry.client.get_model_version(name, number)
    except mlflow.MlflowException as error:
        # For a name that no model can have, such as a name with a slash, MLflow reports an invalid parameter.
        if not is_missing(error) and error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if registry.model(name) is None:
            raise unknown_model(registry, name) from error
        raise ModelNotFoundError(
            f"version {number} of the model {shown(name)} does not exist: it was never registered, or was deleted. "
            f"`shoal models history {name}` lists the versions"
        ) from error
    if not is_ours(found):
        raise InvalidArgumentError(
            f"{name} version {number} was not registered by a job of shoal, so there are no rules by which it could be "
            "compared with the champion: set the alias in MLflow instead"
        )
    return found


def _is_of_another_job(version: ModelVersion, job_id: str | None) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the version {version.version} of the model {shown(version.name)} that job {job_id} has registered does not "
        f"exist any more: the version with this number is now that of job {version.tags[JOB_TAG]}. To promote this "
        "version, name model and version"
    )


def _key_of(version: ModelVersion) -> Key:
    """Return the attempt that has registered a version."""
    return Key(version.tags[JOB_TAG], int(version.tags[ATTEMPT_TAG]))


def _decided_before(version: ModelVersion) -> PromotionResult | None:
    """Return the decision about a version that MLflow has recorded; None if the version has no decision yet."""
    reason = version.tags.get(REASON_TAG)
    if reason == WAITING or reason not in get_args(Reason):
        return None
    metric, values = holdout_metrics(version.tags)
    return PromotionResult(
        **_identity(version),
        alias=version.tags.get(ALIAS_TAG, DEFAULT_ALIAS),
        promoted=reason in PROMOTING,
        decision=DecisionResult(reason=reason, sentence=version.tags.get(DECISION_TAG, reason)),
        metric=metric,
        metrics={metric_name("holdout", name): value for name, value in values.items()},
    )


def _result(version: ModelVersion, register: Register, outcome: Outcome) -> PromotionResult:
    return PromotionResult(
        **_identity(version) | outcome.result(),
        alias=register.alias,
        metric=register.metric,
        metrics=outcome.metrics,
    )


def _identity(version: ModelVersion) -> dict[str, Any]:
    return {
        "model_name": version.name,
        "model_version": str(version.version),
        "model_uri": f"models:/{version.name}/{version.version}",
        "job_id": version.tags[JOB_TAG],
        "mlflow_run_id": version.run_id or None,
    }


@contextmanager
def _present_holdout(register: Register, connection_url: Callable[[str], str | None] | None) -> Iterator[Register]:
    """Return the options with a holdout that can be read now. If a query selects its rows, the query runs again, and
    the rows exist until the end of the block."""
    holdout = register.holdout
    if holdout.sql is None or holdout.connection is None:
        yield register
        return
    from shoal.data.staging.sql import stage_select

    urls = credentials.connections([holdout.connection], os.environ, connection_url)
    with tempfile.TemporaryDirectory(prefix="shoal-holdout-") as folder:
        stage_select(holdout.sql, holdout.params or {}, urls[connection_variable(holdout.connection)], folder)
        staged = holdout.model_copy(update={"paths": (folder,), "staging": folder})
        yield register.model_copy(update={"holdout": staged})
