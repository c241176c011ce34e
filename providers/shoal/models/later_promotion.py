"""Promote a registered version that waits for a decision, if it is better than the present champion."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from shoal.data.sql import connection_variable
from shoal.errors import DataError, InvalidArgumentError, JobError, ModelNotFoundError, shown
from shoal.jobs import credentials
from shoal.jobs.journal import attempts, owners
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import Run, metric_name, tracking_at, uri_of
from shoal.jobs.register import DEFAULT_ALIAS, Register
from shoal.jobs.results import PROMOTING, WAITING, DecisionResult, JobResult, PromotionResult, Reason
from shoal.models import gate, training_rows, waiting_version
from shoal.models.catalog import unknown_model
from shoal.models.contest import Outcome
from shoal.models.decision import Candidate
from shoal.models.gate import Challenge
from shoal.models.holdout import Holdout
from shoal.models.ledger import Ledger
from shoal.models.registry import (
    ALIAS_TAG,
    ATTEMPT_TAG,
    DECISION_TAG,
    JOB_TAG,
    REASON_TAG,
    Registry,
    VersionId,
    answering,
    holdout_metrics,
    is_missing,
    is_ours,
)
from shoal.models.waiting_version import WaitingVersion
from shoal.pool.holder import python_holder
from shoal.secrets.redaction import HIDDEN
from shoal.state import Store

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

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
            key = _key_of(found)
            owners.require_for_version(Store(), key.job_id, key.attempt, holder)
            record = waiting_version.load(found)
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
        gate.load(register, mine, record.input_cols),
        holdout,
        input_cols=record.input_cols,
        trained_on=training_rows.load(run, version.name, mine.number),
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
    from shoal.data.sql import stage_select

    urls = credentials.connections([holdout.connection], os.environ, connection_url)
    with tempfile.TemporaryDirectory(prefix="shoal-holdout-") as folder:
        stage_select(holdout.sql, holdout.params or {}, urls[connection_variable(holdout.connection)], folder)
        staged = holdout.model_copy(update={"paths": (folder,), "staging": folder})
        yield register.model_copy(update={"holdout": staged})
