"""Delete old versions of registered models, unless an alias or a running job still needs them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlalchemy import false, or_, select

from shoal.errors import InvalidArgumentError, RegistryError, ShoalError, shown
from shoal.jobs.files.retention import checked_age
from shoal.jobs.journal.locks import store_lock
from shoal.jobs.journal.steps import RetentionStep, act, transaction
from shoal.jobs.mlflow.promotion_history import Ledger, confirmed_promotions, last_promotions, promotions_of
from shoal.jobs.mlflow.registry import (
    ALIAS_TAG,
    ATTEMPT_TAG,
    JOB_TAG,
    Registry,
    VersionId,
    aliases_of,
    answering,
    missing_ignored,
    quoted,
)
from shoal.jobs.timeouts import DELETION_LOCK_TTL_S
from shoal.pool.holder import ALL_TEAMS, asking_team, may_change
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, Job

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_LOGGED_MODEL = re.compile(r"models:/(m-[^/]+)")
"""Pattern of the source of a version that was registered from a logged model."""

Attempts = set[tuple[str, str]]
"""Pairs of a job's id and an attempt's number."""


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
    registry = Registry.open(tracking_uri)
    if registry is None:
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


def unneeded(
    versions: Sequence[ModelVersion], kept: Collection[str], needed: Attempts, *, before: float, keep_last: int
) -> list[ModelVersion]:
    """Return the versions of a model that may be deleted, the oldest first."""
    return [
        version
        for version in reversed(versions[keep_last:])
        if version.creation_timestamp / 1000 < before
        and str(version.version) not in kept
        and not _has_alias(version)
        and _attempt(version) not in needed
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
                job_id, attempt = _attempt(version)
                job = session.get(Job, (job_id, int(attempt))) if attempt.isdigit() else None
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


def _needed(store: Store, team: str | None) -> Attempts:
    """Return the attempts whose versions are kept: those that have not ended, and those of other teams."""
    is_foreign = false() if team in (None, ALL_TEAMS) else Job.team != team
    with store.reading() as session:
        rows = session.execute(select(Job.id, Job.attempt).where(or_(Job.state.in_(JOB_ACTIVE), is_foreign)))
        return {(job_id, str(attempt)) for job_id, attempt in rows}


def _attempt(version: ModelVersion) -> tuple[str, str]:
    tags: Mapping[str, str] = version.tags
    return tags[JOB_TAG], tags.get(ATTEMPT_TAG, "")


def _has_alias(version: ModelVersion) -> bool:
    return bool(version.aliases) or version.current_stage not in (None, "", "None")


def _described(version: ModelVersion) -> DeletedVersion:
    return DeletedVersion(version.name, str(version.version), version.creation_timestamp / 1000)
