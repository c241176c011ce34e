"""Report on the registered models that jobs have trained, and delete their old versions and old jobs."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import false, or_, select

from shoal.errors import InvalidArgumentError, ModelNotFoundError, RegistryError, ShoalError, shown
from shoal.jobs import mlflow_run
from shoal.jobs.files.retention import checked_age, prune_jobs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import RetentionStep, act, store_lock, transaction
from shoal.jobs.mlflow_run import ATTEMPT_TAG, JOB_TAG, answering, missing_ignored
from shoal.jobs.register import DEFAULT_ALIAS
from shoal.jobs.results import DATA_TAGS, PROMOTING, WAITING
from shoal.jobs.timeouts import DELETION_LOCK_TTL_S
from shoal.lazy_imports import mlflow
from shoal.models import comparison_report
from shoal.models.ledger import Ledger, confirmed_promotions, is_of, last_promotions, promotions_of, version_of
from shoal.models.registry import (
    ALIAS_TAG,
    DECISION_TAG,
    REASON_TAG,
    Registry,
    VersionId,
    aliases_of,
    attempt_of,
    digest_tag,
    holdout_metrics,
    quoted,
)
from shoal.pool.holder import ALL_TEAMS, asking_team, may_change
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, Job, Promotion

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
    if (registry := Registry.open(tracking_uri)) is None:
        return []
    promotions: dict[str, list[Promotion]] = {}
    for promotion in confirmed_promotions(Store(), registry.uri):
        promotions.setdefault(promotion.model, []).append(promotion)
    return [
        _status(registry, model, newest, promotions.get(model.name, []))
        for model in sorted(registry.models(), key=lambda model: model.name)
        if (newest := registry.newest(model, search=model.name in promotions)) is not None
    ]


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
    if (registry := Registry.open(tracking_uri)) is None:
        raise ModelNotFoundError(f"the model {shown(name)} does not exist: no job has registered a model yet")
    if (model := registry.model(name)) is not None:
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


_LOGGED_MODEL = re.compile(r"models:/(m-[^/]+)")
"""Pattern of the source of a version that was registered from a logged model."""


@dataclass(frozen=True)
class DeletedVersion:
    """A deleted version of a registered model; in a dry run, a version that would be deleted.

    Attributes:
        model: Name of the registered model.
        version: Version number.
        created_at: Time at which the version was registered, in seconds since the epoch.
    """

    model: str
    version: str
    created_at: float


@dataclass(frozen=True)
class ModelPruning:
    """Result of `prune_models`: the deleted versions, the number of kept versions, and the errors.

    Attributes:
        deleted: The deleted versions. In a dry run: the versions that would be deleted.
        kept: Number of the other versions that shoal has registered.
        failed: One sentence for each model whose versions could not all be deleted. The next call tries again.
    """

    deleted: tuple[DeletedVersion, ...]
    kept: int
    failed: tuple[str, ...] = ()


def prune_models(
    *,
    older_than: timedelta = timedelta(days=90),
    keep_last: int = 10,
    tracking_uri: str | None = None,
    dry_run: bool = False,
    clock: Callable[[], float] = time.time,
) -> ModelPruning:
    """Delete old versions of registered models.

    A version is deleted only if shoal has registered it, and it is older than `older_than`, and not among the newest
    `keep_last` versions of its model. Versions with any alias or stage are kept, and so are the version that shoal
    promoted last and the versions of running jobs. A process that acts for a team (``$SHOAL_TEAM``) keeps the versions
    of jobs of other teams; a version whose job was deleted from the store belongs to no team.

    The logged model of a deleted version is deleted, too, unless another version uses it. MLflow marks the version and
    the logged model as deleted; `mlflow gc` then removes the files. The MLflow run stays.

    The function may be called at any time, by several processes at the same time, and again after it was killed.

    Args:
        older_than: Age from which versions are deleted, at least one day.
        keep_last: Number of each model's newest versions that are kept.
        tracking_uri: URI of the MLflow server or database. None: the environment variable MLFLOW_TRACKING_URI, or else
            the database in `$SHOAL_HOME`.
        dry_run: Delete nothing, and only return the versions that would be deleted.
        clock: Function that returns the present time in seconds since the epoch.

    Raises:
        InvalidArgumentError: `older_than` or `keep_last` is not legal.
        RegistryError: The registry cannot be used.
        MissingExtraError: MLflow is not installed.
    """
    before = clock() - checked_age(older_than)
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 0:
        raise InvalidArgumentError(f"keep_last={shown(keep_last)} is not legal: it must be a whole number, 0 or more")
    if (registry := Registry.open(tracking_uri)) is None:
        return ModelPruning((), 0)
    store = Store()
    versions, aliases = registry.versions(), {model.name: aliases_of(model) for model in registry.models()}
    team = asking_team()
    needed = _needed(store, team)
    deleted: list[DeletedVersion] = []
    failed = []
    for model, all_of_it in sorted(versions.items()):
        with store.reading() as session:
            last = last_promotions(session, registry.uri, model)
        chosen = {str(each.version) for each in all_of_it if promotions_of(VersionId.of(each), last)}
        kept = {*aliases.get(model, {}).values(), *chosen}
        old = unneeded(all_of_it, kept, needed, before=before, keep_last=keep_last)
        if dry_run:
            deleted += map(_described, old)
            continue
        names = {version.tags[ALIAS_TAG] for version in all_of_it if ALIAS_TAG in version.tags}
        deletion = _Deletion(store, registry, model, {*names, *aliases.get(model, {})}, team)
        try:
            deleted += (_described(version) for version in deletion.of(old))
        except ShoalError as error:  # an error with one model must not stop the deletion of other models' versions
            failed.append(f"{model}: not all old versions could be deleted: {error}")
    total = sum(map(len, versions.values()))
    return ModelPruning(tuple(deleted), total - len(deleted), tuple(failed))


def retain(
    *,
    versions_older_than: timedelta = timedelta(days=90),
    keep_last: int = 10,
    jobs_older_than: timedelta = timedelta(days=30),
    tracking_uri: str | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Delete old versions of registered models that no alias needs, and old ended attempts of jobs.

    `prune_models` deletes the versions, and `prune_jobs` deletes the attempts. Their docstrings list the versions and
    attempts that are kept. If MLflow is not installed, only attempts are deleted. The function may be called at any
    time and repeatedly, for example once a day by a janitor.

    Args:
        versions_older_than: Age from which versions are deleted, at least one day.
        keep_last: Number of each model's newest versions that are kept.
        jobs_older_than: Time since the end of the deleted attempts, at least one day.
        tracking_uri: URI of the MLflow server or database. None: the environment variable MLFLOW_TRACKING_URI, or else
            the database in `$SHOAL_HOME`.
        dry_run: Delete nothing, only return what would be deleted.

    Returns:
        The actions that were taken, and what could not be deleted, one sentence each.

    Raises:
        InvalidArgumentError: An argument is not legal.
        RegistryError: The model registry cannot be used; old attempts of jobs are deleted nevertheless.
    """
    verb = "would delete" if dry_run else "deleted"
    did = []
    if removed := prune_jobs(older_than=jobs_older_than, dry_run=dry_run):
        did.append(f"{verb} {len(removed)} ended attempts of {len({each.job_id for each in removed})} jobs")
    if not mlflow_run.available():
        return did
    pruned = prune_models(
        older_than=versions_older_than, keep_last=keep_last, tracking_uri=tracking_uri, dry_run=dry_run
    )
    counts = Counter(each.model for each in pruned.deleted)
    return [*did, *(f"model {model}: {verb} {counts[model]} old versions" for model in counts), *pruned.failed]


def unneeded(
    versions: Sequence[ModelVersion], kept: Collection[str], needed: Collection[Key], *, before: float, keep_last: int
) -> list[ModelVersion]:
    """Return the versions of a model that may be deleted, the oldest first."""
    return [
        version
        for version in reversed(versions[keep_last:])
        if version.creation_timestamp / 1000 < before
        and str(version.version) not in kept
        and not _has_alias(version)
        and attempt_of(version) not in needed
    ]


@dataclass(frozen=True)
class _Deletion:
    """Deletion of old versions of one registered model.

    Before each deletion, the method `of` checks again whether the version is needed. During the check and the deletion,
    this process holds the locks of the model's aliases, so that no promotion moves an alias.

    Attributes:
        store: Store with the locks and the records of promotions.
        registry: Registry that has the model.
        model: Name of the model.
        aliases: The model's aliases, as far as they are known.
        team: Team for which this process acts.
    """

    store: Store
    registry: Registry
    model: str
    aliases: set[str]
    team: str | None

    def of(self, versions: Sequence[ModelVersion]) -> Iterator[ModelVersion]:
        """Delete the given versions, and yield each deleted version.

        A version is kept if it is needed now (see `_delete`).
        """
        if not versions:
            return
        recorded = {each.alias for each in confirmed_promotions(self.store, self.registry.uri, self.model)}
        # All processes take the locks in the same order, so that there can be no deadlock.
        locks = [
            Ledger(self.store, self.registry.uri, self.model, alias).lock_name
            for alias in sorted(self.aliases | recorded)
        ]
        for version in versions:
            if self._delete(version, locks):
                yield version

    def _delete(self, version: ModelVersion, lock_names: Sequence[str]) -> bool:
        """Delete one version, but keep it if it now has an alias, was promoted last, or belongs to a running job or a
        job of another team."""
        client, number, deleted = self.registry.client, str(version.version), False
        # If another process has deleted the version, the version is not counted as deleted by this call.
        with ExitStack() as stack, answering(self.registry.uri), missing_ignored():
            locks = [stack.enter_context(store_lock(self.store, name, DELETION_LOCK_TTL_S)) for name in lock_names]
            shared = self._is_shared(version)
            with transaction(self.store, RetentionStep.CHECK) as session:
                if not all(lock.renew(session) for lock in locks):
                    return False
                last = last_promotions(session, self.registry.uri, self.model)
                key = attempt_of(version)
                job = session.get(Job, (key.job_id, key.attempt)) if key else None
                if promotions_of(VersionId.of(version), last):
                    return False
                if job is not None and (job.state in JOB_ACTIVE or not may_change(job.team, self.team)):
                    return False
            present = client.get_model_version(self.model, number)
            # The model may have been deleted meanwhile, and registered again with versions of the same numbers.
            if VersionId.of(present) != VersionId.of(version) or _has_alias(present):
                return False
            # The version is deleted last. If this process dies before this step, the next call finds the version again.
            logged = _LOGGED_MODEL.fullmatch(version.source or "")
            if logged and not shared:
                # After `mlflow gc`, the logged model does not exist any more.
                with act(RetentionStep.DELETE_LOGGED_MODEL), missing_ignored():
                    client.delete_logged_model(logged[1])
            with act(RetentionStep.DELETE_VERSION):
                client.delete_model_version(self.model, number)
            deleted = True
        return deleted

    def _is_shared(self, version: ModelVersion) -> bool:
        """Return whether another version uses the same files, for example a copy, or a version of the same logged
        model."""
        try:
            copied = f"models:/{self.model}/{version.version}"
            sources = [quoted(source) for source in (version.source, copied) if source]
        except RegistryError:
            # MLflow cannot search for other versions that use the same files, because the path of the files contains
            # characters that a search must not contain. The files are kept, because another version may use them.
            return True
        me = (self.model, str(version.version))
        return any(
            (other.name, str(other.version)) != me
            for source in sources
            for other in self.registry.client.search_model_versions(f"source_path = {source}", max_results=2)
        )


def delete_waiting(store: Store, registry: Registry, model: str, replaced: Collection[Key]) -> None:
    """Delete the versions that attempts have registered and that still wait for a decision: a further attempt of the
    job has replaced them."""
    try:
        found = [each for each in registry.versions(model).get(model, []) if attempt_of(each) in replaced]
        waiting = [each for each in found if each.tags.get(REASON_TAG) == WAITING]
        aliases = {each.tags[ALIAS_TAG] for each in waiting}
        for version in _Deletion(store, registry, model, aliases, asking_team()).of(waiting):
            print(f"{model} version {version.version}, which an earlier attempt has registered, is deleted", flush=True)
    except Exception as error:  # the new version is registered, so the job must not fail
        print(f"the versions of earlier attempts could not be deleted: {error}", flush=True)


def _needed(store: Store, team: str | None) -> set[Key]:
    """Return the attempts whose versions are kept: those that have not ended, and those of other teams."""
    is_foreign = false() if team in (None, ALL_TEAMS) else Job.team != team
    rows = store.rows(select(Job.id, Job.attempt).where(or_(Job.state.in_(JOB_ACTIVE), is_foreign)))
    return {Key(job_id, attempt) for job_id, attempt in rows}


def _has_alias(version: ModelVersion) -> bool:
    return bool(version.aliases) or version.current_stage not in (None, "", "None")


def _described(version: ModelVersion) -> DeletedVersion:
    return DeletedVersion(version.name, str(version.version), version.creation_timestamp / 1000)
