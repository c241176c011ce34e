"""The gate: register a model and let it become champion, decide about a version that waits, withdraw a promotion."""

from __future__ import annotations

import functools
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, get_args

from sqlalchemy import select

from shoal.data.connections import KNOWN, connection_variable
from shoal.data.connector import DataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError, ModelNotFoundError, RegistryError, shown
from shoal.jobs import credentials, mlflow_run
from shoal.jobs.journal import attempts, owners
from shoal.jobs.journal.attempts import Key
from shoal.jobs.register import DEFAULT_ALIAS, Register
from shoal.jobs.results import PROMOTING, WAITING, DecisionResult, JobResult, PromotionResult, Reason
from shoal.jobs.submission import attach
from shoal.lazy_imports import mlflow
from shoal.models import training_record
from shoal.models.catalog import delete_waiting, unknown_model
from shoal.models.contest import COLUMNS_TAG, Challenge, Outcome, champion_of, columns_of, holdout_named, load, reading
from shoal.models.decision import Candidate, Evaluation
from shoal.models.drift import TrainingProfile
from shoal.models.holdout import Holdout, try_out
from shoal.models.ledger import Ledger, Withdrawal
from shoal.models.loading import Predictor
from shoal.models.metrics import check_output
from shoal.models.registry import (
    ALIAS_TAG,
    DECISION_TAG,
    REASON_TAG,
    Registry,
    VersionId,
    digest_tag,
    holdout_metrics,
    is_ours,
    metric_tag,
)
from shoal.models.training_record import TrainingRows
from shoal.pool.holder import python_holder
from shoal.secrets.redaction import HIDDEN, redact_all
from shoal.state import Store
from shoal.state.schema import Job, Promotion
from shoal.training.boosting.library import Output

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from shoal.jobs.driver.attempt_context import AttemptContext


def try_champion(run: mlflow_run.Run, register: Register, input_cols: Sequence[str] = ()) -> None:
    """Check before the training that the champion can be compared later: load it, and predict rows of the holdout.

    Raises:
        JobError: The champion cannot be loaded, or cannot predict the holdout.
        RegistryError: MLflow cannot be reached.
    """
    version, columns = None, input_cols
    with mlflow_run.answering(run.uri), mlflow_run.missing_ignored():
        version = champion_of(run.client, register)
        if version is not None:
            columns = columns_of(run.client, register, version, input_cols)
    if version is None:
        return
    holdout = DataConnector.from_spec(register.holdout)
    with reading(register, version):
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
        # The rows of the holdout are copied again at the promotion: the copy is removed when the job ends.
        if register.holdout.is_copied:
            holdout = register.holdout.model_copy(update={"staging": None})
            register = register.model_copy(update={"holdout": holdout})
        # The options of a training function have further fields, which are among the arguments.
        options = redact_all(register.model_dump(mode="json", include=set(Register.model_fields)))
        return cls(options, holdout_digest, label_col, tuple(input_cols), group_col)

    def options(self) -> Register:
        """Return the options with which the version was registered."""
        return Register.parse(self.register)

    def tags(self, run: mlflow_run.Run) -> dict[str, str]:
        """Store the record in the MLflow run, and return the tags that mark the version as waiting."""
        return {WAITING_TAG: run.log_record(_WAITING_FOLDER, json.dumps(asdict(self))), REASON_TAG: WAITING}

    @classmethod
    def load(cls, version: ModelVersion) -> Self:
        """Load the record of a registered version.

        Raises:
            InvalidArgumentError: The version has no record: it has never waited for a decision.
            JobError: The record cannot be read.
        """
        name, uri = f"{version.name} version {version.version}", version.tags.get(WAITING_TAG)
        if uri is None:
            raise InvalidArgumentError(
                f"{name} does not wait for a decision: only a job with register.promote=false registers such a version"
            )
        try:
            return cls(**json.loads(mlflow.artifacts.load_text(uri)))
        except Exception as error:
            if mlflow_run.is_unreachable(error):
                raise
            raise JobError(
                f"{name} cannot be promoted, because its rules and its holdout in {uri} cannot be read: "
                f"{str(error).strip() or type(error).__name__}. Train the model again, or set the alias in MLflow"
            ) from error


def enter(
    place: AttemptContext,
    run: mlflow_run.Run,
    register: Register,
    *,
    model_uri: str,
    model: Predictor,
    label_col: str,
    input_cols: Sequence[str] = (),
    group_col: str | None = None,
    trained_on: TrainingRows | None = None,
    tags: Mapping[str, str] | None = None,
    note: str = "",
    profile: TrainingProfile | None = None,
) -> Outcome:
    """Evaluate and register a model, and promote the model if it is better than the champion on the holdout.

    With ``promote=False`` in `register`, the model is compared with the champion and waits for a decision. A report of
    the comparison is printed and stored in the MLflow run. `note` is the end of the decision's sentence, and so is the
    largest drift in the profile of the training rows.

    Raises:
        DataError: The holdout lacks a column that the model needs, or has a null label.
        JobError: This attempt has ended or was replaced by a newer attempt.
        RegistryError: MLflow cannot be reached.
    """
    if not place.is_current():
        raise JobError(
            f'the model of attempt {place.key.attempt} of job "{place.key.job_id}" is not registered, '
            "because the attempt has ended or a newer attempt of the job has replaced it"
        )
    holdout = Holdout.read(register, label_col, group_col)
    challenge = Challenge.of(run, register, model, holdout, input_cols=input_cols, trained_on=trained_on)
    run.log_values(holdout_named(challenge.evaluation.metrics))
    columns = {COLUMNS_TAG: json.dumps(list(input_cols))} if input_cols else {}
    digest = holdout.connector.digest()
    tags = {**place.tags, **(tags or {}), **columns, **training_record.store_rows(run, challenge.trained_on)}
    profile = profile or TrainingProfile()
    tags |= profile.store(run)
    if not register.promote:
        record = WaitingVersion.of(register, digest, label_col, input_cols, group_col)
        tags |= record.tags(run)
    challenger = registered(register, model_uri, challenge.evaluation, digest, tags)
    ledger = Ledger.of(run.client, place.store, register)
    contest = challenge.contest(ledger, challenger, place.key)
    say = functools.partial(print, flush=True)
    outcome = contest.decided() if register.promote else contest.previewed()
    sentence = "; ".join(filter(None, [outcome.decision.sentence, note, profile.note]))
    decision = outcome.decision.model_copy(update={"sentence": sentence})
    outcome = replace(outcome, decision=decision, drift=profile.drift)
    outcome = challenge.reported(outcome, ledger, say=say)
    if earlier := attempts.without_success(place.store, place.key, same_spec=True):
        delete_waiting(place.store, Registry(run.client, ledger.registry), register.model, earlier)
    if not register.promote:
        say(f"to promote it: shoal models promote {shlex.quote(register.model)} {challenger.version}")
    return outcome


def registered(
    register: Register, model_uri: str, evaluation: Evaluation, holdout_digest: str, tags: Mapping[str, str]
) -> Candidate:
    """Register an evaluated model as a new version."""
    measured = {metric_tag(name): repr(value) for name, value in evaluation.metrics.items()}
    tagged = {**measured, digest_tag(register.metric): holdout_digest, ALIAS_TAG: register.alias}
    version = mlflow.register_model(model_uri, register.model, tags={**tags, **tagged})
    return Candidate(VersionId.of(version), evaluation)


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
    uri = mlflow_run.uri_of(tracking_uri or (job_id and _tracking_uri_of(attempts.find_latest(Store(), job_id))))
    if (registry := Registry.open(uri)) is None:
        raise ModelNotFoundError(f"the model {shown(name)} does not exist: no job has registered a model yet")
    with mlflow_run.tracking_at(uri):
        with mlflow_run.answering(registry.uri):
            found = _version(registry, name, number, job_id if is_own else None)
            if (earlier := _decided_before(found)) is not None:
                on_log(f"decided before, so nothing changes: {earlier.decision.sentence}")
                return earlier
            holder = holder or python_holder()
            key = _key_of(found)
            owners.require_for_version(Store(), key.job_id, key.attempt, holder)
            record = WaitingVersion.load(found)
        run = mlflow_run.Run(registry.client, uri, "", found.run_id or "", "")
        with _present_holdout(record.options(), connection_url) as register:
            return _decide(run, Ledger.of(registry.client, Store(), register, holder), found, register, record, on_log)


def _decide(
    run: mlflow_run.Run,
    ledger: Ledger,
    version: ModelVersion,
    register: Register,
    record: WaitingVersion,
    on_log: Callable[[str], object],
) -> PromotionResult:
    """Evaluate a version on the holdout, promote it if it is better than the champion, and report the decision."""
    holdout, mine = Holdout.read(register, record.label_col, record.group_col), VersionId.of(version)
    if holdout.connector.digest() != record.holdout_digest:
        raise DataError(
            f"{version.name} version {version.version} is not promoted: its holdout has changed since it was "
            "registered. Restore the rows of the holdout, or train the model again"
        )
    with mlflow_run.answering(ledger.registry):
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
        outcome = challenge.reported(outcome, ledger, say=on_log)
    return PromotionResult(
        **_identity(version) | outcome.result(),
        alias=register.alias,
        metric=register.metric,
        metrics=outcome.metrics,
    )


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
        job = attempts.latest(Store(), training)
        if job.result is None:
            raise InvalidArgumentError(
                f"job {training} is {job.state.value} and has no result, so there is no version to promote"
            )
        training = job.result
    result = training if isinstance(training, JobResult) else JobResult.parse(training)
    if result.model_name is None or result.model_version is None:
        raise InvalidArgumentError(
            f"job {result.job_id} has registered no model, so there is no version to promote: set register in its spec"
        )
    return result.model_name, result.model_version, result.job_id, result.skipped is None


def _tracking_uri_of(job: Job | None) -> str | None:
    """Return the tracking URI that a job has used; None if it used none, or if the store had to hide its password.

    All promotions of a model have to use the same URI, because the lock and the records of promotions belong to it.
    """
    tracking: Mapping[str, Any] | None = job.spec.get("tracking") if job else None
    uri = None if tracking is None else mlflow_run.uri_of_job(tracking.get("uri"))
    return None if uri is None or HIDDEN in uri else uri


def _version(registry: Registry, name: str, number: str, job_id: str | None) -> ModelVersion:
    """Return a version that a job has registered (None: any job)."""
    try:
        found = registry.client.get_model_version(name, number)
    except mlflow.MlflowException as error:
        # For a name that no model can have, such as a name with a slash, MLflow reports an invalid parameter.
        if not mlflow_run.is_missing(error) and error.error_code != "INVALID_PARAMETER_VALUE":
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
    if job_id is not None and found.tags[mlflow_run.JOB_TAG] != job_id:
        raise ModelNotFoundError(
            f"the version {found.version} of the model {shown(found.name)} that job {job_id} has registered does not "
            f"exist any more: the version with this number is now that of job {found.tags[mlflow_run.JOB_TAG]}. To "
            "promote this version, name model and version"
        )
    return found


def _key_of(version: ModelVersion) -> Key:
    """Return the attempt that has registered a version."""
    return Key(version.tags[mlflow_run.JOB_TAG], int(version.tags[mlflow_run.ATTEMPT_TAG]))


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
        metrics=holdout_named(values),
    )


def _identity(version: ModelVersion) -> dict[str, Any]:
    return {
        "model_name": version.name,
        "model_version": str(version.version),
        "model_uri": f"models:/{version.name}/{version.version}",
        "job_id": version.tags[mlflow_run.JOB_TAG],
        "mlflow_run_id": version.run_id or None,
    }


@contextmanager
def _present_holdout(register: Register, connection_url: Callable[[str], str | None] | None) -> Iterator[Register]:
    """Return the options with a holdout that can be read now. Rows that are not read in place are copied again, and
    the copy exists until the end of the block."""
    holdout = register.holdout
    urls = credentials.connections(holdout.connections(), os.environ, connection_url)
    KNOWN.update(urls)
    if not holdout.is_copied:
        yield register
        return
    from shoal.data.row_copies import copy_rows

    url = urls.get(connection_variable(holdout.connection or ""))
    with tempfile.TemporaryDirectory(prefix="shoal-holdout-") as folder:
        copy_rows(holdout, url, folder)
        staged = holdout.model_copy(update={"staging": folder})
        yield register.model_copy(update={"holdout": staged})


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
    registry = Registry.open(tracking_uri or _tracking_uri_of(job))
    if registry is None or registry.uri != promotion.registry_uri:
        raise RegistryError(
            f"the model {promotion.model} was promoted in the MLflow registry {promotion.registry_uri}: "
            "name this registry as tracking_uri"
        )
    ledger = Ledger(store, registry.uri, promotion.model, promotion.alias, holder)
    return Withdrawal(registry, ledger, promotion).done()


def _promotion_of(store: Store, job: Job) -> Promotion:
    """Return the newest promotion of the version that a job has registered."""
    version = JobResult.model_validate(job.result).model_version if job.result else None
    query = select(Promotion).filter_by(job_id=job.id, attempt=job.attempt, version=version)
    promotion = store.scalar(query.order_by(Promotion.id.desc()).limit(1))
    if promotion is None:
        raise InvalidArgumentError(
            f'job "{job.id}" (attempt {job.attempt}) has promoted no model: name the job of a promoted version, '
            "which `shoal models history` shows"
        )
    return promotion
