"""Promote a registered version that waits for a decision, if it is better than the present champion, and withdraw the
promotion of a job's model, so that the version that was champion before is champion again."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from sqlalchemy import select

from shoal.data.syntax import connection_variable
from shoal.errors import DataError, InvalidArgumentError, JobError, ModelNotFoundError, RegistryError, shown
from shoal.jobs import credentials, teams
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.locks import HeldLock, store_lock
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.journal.store_outages import patiently
from shoal.jobs.mlflow import promotion, training_rows, waiting_version
from shoal.jobs.mlflow.contest import Outcome
from shoal.jobs.mlflow.holdout import Holdout
from shoal.jobs.mlflow.job_run import Run, metric_name, tracking_at, uri_of
from shoal.jobs.mlflow.models import unknown_model
from shoal.jobs.mlflow.promotion import Challenge
from shoal.jobs.mlflow.promotion_decision import Candidate
from shoal.jobs.mlflow.promotion_history import Ledger, is_of, is_recorded, version_of, withdrawn
from shoal.jobs.mlflow.registry import (
    ALIAS_TAG,
    ATTEMPT_TAG,
    DECISION_TAG,
    JOB_TAG,
    REASON_TAG,
    WITHDRAWN,
    Registry,
    VersionId,
    aliases_of,
    answering,
    holdout_metrics,
    is_missing,
    is_ours,
)
from shoal.jobs.mlflow.waiting_version import WaitingVersion
from shoal.jobs.results import PROMOTING, WAITING, DecisionResult, JobResult, PromotionResult, Reason
from shoal.jobs.specs.function import parse_spec
from shoal.jobs.specs.register import DEFAULT_ALIAS, Register
from shoal.jobs.submission import attach
from shoal.jobs.timeouts import PROMOTION_LOCK_TTL_S
from shoal.pool.holder import python_holder
from shoal.redaction import HIDDEN
from shoal.state import Store
from shoal.state.schema import Job, Promotion, PromotionState

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
            teams.require_for_version(Store(), _key_of(found), holder)
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
        promotion.load(register, mine, record.input_cols),
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
    from shoal.data.staging.sql import stage_select

    urls = credentials.connections([holdout.connection], os.environ, connection_url)
    with tempfile.TemporaryDirectory(prefix="shoal-holdout-") as folder:
        stage_select(holdout.sql, holdout.params or {}, urls[connection_variable(holdout.connection)], folder)
        staged = holdout.model_copy(update={"paths": (folder,), "staging": folder})
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
