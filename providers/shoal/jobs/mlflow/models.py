"""Report on the registered models that jobs have trained: champion, challengers, and metric over time."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, ModelNotFoundError, shown
from shoal.jobs.mlflow import comparison_report
from shoal.jobs.mlflow.promotion_history import confirmed_promotions, is_of, promotions_of, version_of
from shoal.jobs.mlflow.registry import (
    ALIAS_TAG,
    ATTEMPT_TAG,
    DECISION_TAG,
    JOB_TAG,
    REASON_TAG,
    Registry,
    VersionId,
    aliases_of,
    digest_tag,
    holdout_metrics,
)
from shoal.jobs.register import DEFAULT_ALIAS
from shoal.jobs.results import DATA_TAGS, PROMOTING, WAITING
from shoal.state import Store
from shoal.state.schema import Promotion

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

_CHALLENGERS = 10
"""Number of challengers that `describe_model` returns."""


@dataclass(frozen=True)
class VersionStatus:
    """One version of a registered model. A field is None or empty if the version's tags do not contain its value.

    Attributes:
        version: Version number in MLflow's registry.
        created_at: Time at which the version was registered, in seconds since the epoch.
        metric: Name of the metric that decided about the version.
        value: Value of the deciding metric on the holdout.
        metrics: Values of all metrics on the holdout, by name.
        promoted: Whether the version became the champion; None if that is not recorded, or the version waits for a
            decision.
        reason: Name of the rule that decided; `waiting` if the version waits for a decision.
        decision: The decision in one sentence.
        job_id: Id of the job that trained the version.
        attempt: Number of the attempt that trained the version.
        mlflow_run_id: Id of the MLflow run in which the version was trained.
        data: Description of the training rows: `rows`, `digest`, `time_from` and `time_to`.
    """

    version: str
    created_at: float
    metric: str | None
    value: float | None
    metrics: Mapping[str, float]
    promoted: bool | None
    reason: str | None
    decision: str | None
    job_id: str | None
    attempt: int | None
    mlflow_run_id: str | None
    data: Mapping[str, str]


@dataclass(frozen=True)
class ModelStatus:
    """One registered model: its champion, and its newest challenger.

    Attributes:
        name: Name of the model in MLflow's registry.
        alias: Alias of the champion.
        champion: Version that has the alias; None if no version has the alias.
        champion_since: Time at which the champion was promoted, or registered if no promotion is recorded, in seconds
            since the epoch; None if there is no champion.
        challenger: The newest version that shoal has registered.
        registered: Number of versions that were registered so far, including deleted versions.
        aliases: Versions of all aliases of the model, by alias.
    """

    name: str
    alias: str
    champion: VersionStatus | None
    champion_since: float | None
    challenger: VersionStatus
    registered: int
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class SliceStatus:
    """Metric of a version on one slice of the holdout, read from the report of the version's comparison with the
    champion.

    Attributes:
        name: Value of the column `by`.
        rows: Number of rows of the slice.
        value: Metric of the version on these rows; None if it is not defined.
    """

    name: str
    rows: int
    value: float | None


@dataclass(frozen=True)
class ModelDetails:
    """A registered model with the champion's slices and the latest challengers.

    Attributes:
        status: Champion, newest challenger and aliases.
        versions: Number of versions that shoal has registered and that still exist.
        slices: The champion's metric on each slice, measured before its promotion; empty if it is not recorded.
        challengers: The newest versions that shoal has registered, ten at most, the newest first.
    """

    status: ModelStatus
    versions: int
    slices: tuple[SliceStatus, ...]
    challengers: tuple[VersionStatus, ...]


@dataclass(frozen=True)
class HistoryEntry:
    """One version in the history of a model. A promoted version stays in the history even if the version is deleted.

    Attributes:
        version: Version number in MLflow's registry.
        at: Time at which the version was registered, in seconds since the epoch. If the version does not exist any
            more: time at which it was promoted.
        metric: Name of the metric that decided.
        value: Value of the deciding metric on the holdout with which the version was evaluated.
        holdout_digest: Digest of the rows of the holdout with which the version was evaluated. Only values with equal
            digests were measured on equal rows.
        promoted: Whether the version became the champion; None if that is not recorded, or the version waits for a
            decision.
        reason: Name of the rule that decided; `waiting` if the version waits for a decision.
        promoted_at: Time of the version's latest promotion; None if no promotion is recorded in this store.
        previous: Version that had the alias before the latest promotion of this version.
        exists: Whether the version still exists in the registry.
        decision: The decision in one sentence.
        job_id: Id of the job that trained the version.
    """

    version: str
    at: float
    metric: str | None
    value: float | None
    holdout_digest: str | None
    promoted: bool | None
    reason: str | None
    promoted_at: float | None
    previous: str | None
    exists: bool
    decision: str | None
    job_id: str | None


def list_models(tracking_uri: str | None = None) -> list[ModelStatus]:
    """List the registered models with versions that shoal has registered, sorted by name.

    Args:
        tracking_uri: URI of the MLflow server or database. None: the environment variable MLFLOW_TRACKING_URI, or else
            the database in `$SHOAL_HOME`.

    Raises:
        RegistryError: The registry cannot be used.
        MissingExtraError: MLflow is not installed.
    """
    registry = Registry.open(tracking_uri)
    if registry is None:
        return []
    promotions: dict[str, list[Promotion]] = {}
    for promotion in confirmed_promotions(Store(), registry.uri):
        promotions.setdefault(promotion.model, []).append(promotion)
    found = []
    for model in sorted(registry.models(), key=lambda model: model.name):
        newest = registry.newest(model, search=model.name in promotions)
        if newest is not None:
            found.append(_status(registry, model, newest, promotions.get(model.name, [])))
    return found


def describe_model(name: str, tracking_uri: str | None = None) -> ModelDetails:
    """Return a registered model's champion, the champion's metric per slice, and the last ten challengers.

    Args:
        name: Name of the registered model.
        tracking_uri: URI of the MLflow server or database; None as in `list_models`.

    Raises:
        ModelNotFoundError: There is no such model, or shoal has registered no version of it.
        RegistryError: The registry cannot be used.
        MissingExtraError: MLflow is not installed.
    """
    registry, model, versions = _found(name, tracking_uri)
    promotions = confirmed_promotions(Store(), registry.uri, name)
    status = _status(registry, model, versions[0], promotions)
    challengers = tuple(version_status(each, promotions) for each in versions[:_CHALLENGERS])
    return ModelDetails(status, len(versions), _slices(registry, status.champion), challengers)


def model_history(name: str, *, limit: int = 100, tracking_uri: str | None = None) -> list[HistoryEntry]:
    """Return the versions of a registered model with their metric, the newest first.

    Promoted versions that were deleted later are included, because the store keeps records of promotions.

    Args:
        name: Name of the registered model.
        limit: Greatest number of versions to return, from 1.
        tracking_uri: URI of the MLflow server or database; None as in `list_models`.

    Raises:
        InvalidArgumentError: `limit` is not a positive whole number.
        ModelNotFoundError: There is no such model, or shoal has registered no version of it.
        RegistryError: The registry cannot be used.
        MissingExtraError: MLflow is not installed.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidArgumentError(f"limit={shown(limit)} is not legal: it must be a whole number, 1 or more")
    registry, _, versions = _found(name, tracking_uri)
    promotions = confirmed_promotions(Store(), registry.uri, name)
    entries, exist = [], {str(version.version): VersionId.of(version) for version in versions}
    for version in versions:
        latest = next(iter(promotions_of(exist[str(version.version)], promotions)), None)
        entries.append(_entry(str(version.version), version, latest))
    deleted: dict[VersionId, Promotion] = {}
    for promotion in promotions:
        if not is_of(promotion, exist.get(promotion.version)):
            deleted.setdefault(version_of(promotion), promotion)
    entries += [_entry(version.number, None, promotion) for version, promotion in deleted.items()]
    # A model that was deleted and registered again has several versions of one number.
    return sorted(entries, key=lambda each: (int(each.version), each.exists, each.at), reverse=True)[:limit]


def _found(name: str, tracking_uri: str | None) -> tuple[Registry, RegisteredModel, list[ModelVersion]]:
    """Return the registry, the registered model `name`, and the versions of the model that shoal has registered."""
    registry = Registry.open(tracking_uri)
    if registry is None:
        raise ModelNotFoundError(f"the model {shown(name)} does not exist: no job has registered a model yet")
    model = registry.model(name)
    if model is not None:
        if versions := registry.versions(name).get(name):
            return registry, model, versions
        raise ModelNotFoundError(
            f"shoal has registered no version of the model {shown(name)}: name a model from `shoal models list`"
        )
    raise unknown_model(registry, name)


def unknown_model(registry: Registry, name: str) -> ModelNotFoundError:
    """Return the error about a model that does not exist, with the name of a similar model."""
    near = difflib.get_close_matches(name, [model.name for model in registry.models()], n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else "`shoal models list` shows all models"
    return ModelNotFoundError(f"the model {shown(name)} does not exist: {hint}")


def _status(
    registry: Registry, model: RegisteredModel, newest: ModelVersion, promotions: Sequence[Promotion]
) -> ModelStatus:
    """Build the status of a registered model from its aliases, its newest version and its promotions."""
    aliases = aliases_of(model)
    alias = newest.tags.get(ALIAS_TAG) or (promotions[0].alias if promotions else DEFAULT_ALIAS)
    number = aliases.get(alias)
    champion = since = None
    if number is not None:
        found = newest if number == str(newest.version) else registry.version(model.name, number)
        champion = version_status(found, promotions)
        promoted = promotions_of(VersionId.of(found), promotions)
        times = (each.confirmed_at for each in promoted if each.alias == alias)
        since = next(times, None) or champion.created_at
    return ModelStatus(
        name=model.name,
        alias=alias,
        champion=champion,
        champion_since=since,
        challenger=version_status(newest, promotions),
        registered=max(int(version.version) for version in (newest, *(model.latest_versions or ()))),
        aliases=aliases,
    )


def version_status(version: ModelVersion, promotions: Iterable[Promotion]) -> VersionStatus:
    """Build the status of a model's registered version from the version's tags in MLflow and the model's promotions."""
    tags = version.tags
    metric, metrics = holdout_metrics(tags)
    reason, number = tags.get(REASON_TAG), str(version.version)
    was = None if reason in (None, WAITING) else reason in PROMOTING
    if promotions_of(VersionId.of(version), promotions):
        was = True
    attempt = tags.get(ATTEMPT_TAG, "")
    return VersionStatus(
        version=number,
        created_at=version.creation_timestamp / 1000,
        metric=metric,
        value=None if metric is None else metrics.get(metric),
        metrics=metrics,
        promoted=was,
        reason=reason,
        decision=tags.get(DECISION_TAG),
        job_id=tags.get(JOB_TAG),
        attempt=int(attempt) if attempt.isdigit() else None,
        mlflow_run_id=version.run_id or None,
        data={
            name.removeprefix(DATA_TAGS): value for name, value in sorted(tags.items()) if name.startswith(DATA_TAGS)
        },
    )


def _entry(number: str, version: ModelVersion | None, promotion: Promotion | None) -> HistoryEntry:
    status = None if version is None else version_status(version, [promotion] if promotion else ())
    tags: Mapping[str, str] = {} if version is None else version.tags
    metric = status.metric if status and status.metric else promotion.metric if promotion else None
    value = status.value if status and status.value is not None else promotion.value if promotion else None
    recorded = promotion.holdout_digest if promotion else None
    return HistoryEntry(
        version=number,
        at=status.created_at if status else promotion.created_at if promotion else 0.0,
        metric=metric,
        value=value,
        holdout_digest=(tags.get(digest_tag(metric)) if metric else None) or recorded,
        promoted=status.promoted if status else True,
        reason=status.reason if status else None,
        promoted_at=promotion.confirmed_at if promotion else None,
        previous=promotion.previous if promotion else None,
        exists=version is not None,
        decision=status.decision if status else None,
        job_id=status.job_id if status else promotion.job_id if promotion else None,
    )


def _slices(registry: Registry, champion: VersionStatus | None) -> tuple[SliceStatus, ...]:
    """Read the champion's metric on each slice from the report in its MLflow run."""
    if champion is None or champion.mlflow_run_id is None:
        return ()
    import mlflow

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = registry.client.download_artifacts(
                champion.mlflow_run_id, f"{comparison_report.FOLDER}/promotion.json", folder
            )
            document: dict[str, Any] = json.loads(Path(path).read_text())
        # One run may have registered several versions, so the report in the run may be about another version.
        if document["challenger"]["version"] != champion.version:
            return ()
        return tuple(
            SliceStatus(str(each["slice"]), int(each["rows"]), _number(each["challenger"]))
            for each in document["slices"]
        )
    except (mlflow.MlflowException, OSError, ValueError, KeyError, TypeError):
        return ()


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, int | float) else None
