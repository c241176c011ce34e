"""Compare a new model (challenger) with the champion on the same held-out data; the better one gets the alias."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError, JobError
from shoal.jobs.credentials import without_credentials
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.locks import HeldLock, store_lock
from shoal.jobs.journal.retries import patiently
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.metrics import Mode
from shoal.jobs.mlflow import scoring
from shoal.jobs.mlflow.ledger import Ledger
from shoal.jobs.mlflow.tracking import Run
from shoal.jobs.spec import ChampionResult, Register
from shoal.state import Store
from shoal.state.schema import Promotion, PromotionState

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOCK_TTL_S = 120.0
"""Seconds until the lock expires. Its holder makes two requests to MLflow, each with a default time limit of 120 s. A
holder that takes longer loses the lock; its next round then compares again and corrects the alias."""

_COLUMNS = "shoal.input_cols"
"""Tag of a version: JSON list of the input columns, for models whose signature does not name them."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of comparing a challenger with the champion.

    Attributes:
        version: The challenger's version in the registry.
        value: The challenger's metric on the holdout.
        promoted: Whether the alias points to the challenger now.
        champion: Version that the challenger was compared with; None if the alias pointed to no version.
    """

    version: str
    value: float
    promoted: bool
    champion: ChampionResult | None


def is_better(challenger: float, champion: float | None, mode: Mode) -> bool:
    """Return whether a challenger replaces the champion.

    The challenger must be strictly better: with equal metrics the champion stays. A challenger whose metric is NaN is
    never better; a champion whose metric is NaN is always worse than a number.

    Args:
        challenger: The challenger's metric.
        champion: The champion's metric on the same data; None if there is no champion.
        mode: "min" if a lower metric is better, "max" if a higher one is.
    """
    if math.isnan(challenger):
        return False
    if champion is None or math.isnan(champion):
        return True
    return challenger < champion if mode == "min" else challenger > champion


def check_holdout(register: Register, label_col: str, input_cols: Sequence[str]) -> None:
    """Check, before hours of training, that a holdout has rows and the needed columns.

    Args:
        register: Settings that name the holdout.
        label_col: Label column of the holdout.
        input_cols: Input columns of the model, as far as they are known.

    Raises:
        DataError: The holdout does not exist, has no rows, or lacks a column.
    """
    from shoal.data.connector import DataConnector

    holdout: DataConnector = DataConnector.from_spec(register.holdout)
    if missing := sorted({*input_cols, label_col} - set(holdout.schema().names)):
        raise DataError(f"the holdout lacks columns that the model needs: {', '.join(missing)}")
    if not holdout.num_rows():
        raise DataError("the holdout has no rows")


def enter(
    store: Store,
    key: Key,
    run: Run,
    register: Register,
    *,
    is_current: Callable[[], bool],
    tags: Mapping[str, str],
    model_uri: str,
    model: Any,
    label_col: str,
    input_cols: Sequence[str] = (),
) -> Outcome:
    """Evaluate a model on the holdout, register it, and give it the alias if it is better than the champion.

    Args:
        store: Store that has the attempt's row.
        key: The attempt that trained the model.
        run: MLflow run that the model was logged in.
        register: Name to register the model under, and how to compare it.
        is_current: Function that returns whether the attempt is running and the newest of its job.
        tags: Tags for the registered version.
        model_uri: URI of the logged model.
        model: The same model, loaded.
        label_col: Label column of the holdout.
        input_cols: Input columns of a model whose signature does not name them.

    Raises:
        DataError: The holdout lacks a column that a model needs, or has a null label.
        JobError: The champion cannot be loaded, or this attempt has been ended or replaced by a newer one.
    """
    from shoal.data.connector import DataConnector

    if not is_current():
        raise JobError(
            f'the model of attempt {key.attempt} of job "{key.job_id}" is not registered, '
            "because the attempt has ended or a newer one has replaced it"
        )
    holdout: DataConnector = DataConnector.from_spec(register.holdout)

    def score_champion(uri: str) -> float:
        # A champion whose signature names no columns has its own list, which may differ from the challenger's.
        listed = run.client.get_model_version(register.model, uri.rpartition("/")[2]).tags.get(_COLUMNS)
        columns = json.loads(listed) if listed else input_cols
        try:
            return scoring.score(scoring.load(uri), holdout, label_col, register.metric, input_cols=columns)
        except DataError as error:
            raise DataError(f"the champion {uri} cannot be evaluated: {error}") from error

    value = scoring.score(model, holdout, label_col, register.metric, input_cols=input_cols)
    run.log_values({f"holdout-{register.metric}": value})
    outcome = challenge(
        run.client,
        store,
        register,
        model_uri,
        key=key,
        value=value,
        holdout_digest=holdout.digest(),
        tags={**tags, **({_COLUMNS: json.dumps(list(input_cols))} if input_cols else {})},
        score_champion=score_champion,
    )
    print(describe(outcome, register), flush=True)
    return outcome


def challenge(
    client: MlflowClient,
    store: Store,
    register: Register,
    model_uri: str,
    *,
    key: Key,
    value: float,
    holdout_digest: str,
    tags: dict[str, str],
    score_champion: Callable[[str], float],
) -> Outcome:
    """Register a model as a new version, and give it the alias if it is better than the champion.

    Args:
        client: MLflow client.
        store: Store for the lock and the record of promotions, because MLflow's aliases have no compare-and-swap.
        register: Name to register the model under, and how to compare it.
        model_uri: URI of the logged challenger.
        key: The attempt that trained the challenger.
        value: The challenger's metric on the holdout.
        holdout_digest: Digest of the holdout's rows.
        tags: Tags for the registered version.
        score_champion: Computes the same metric on the same holdout for the model at a URI.
    """
    import mlflow

    tagged = {f"holdout.{register.metric}": repr(value), f"holdout.{register.metric}.digest": holdout_digest}
    version = mlflow.register_model(model_uri, register.model, tags={**tags, **tagged})
    registry = without_credentials(client._registry_uri)
    contest = _Contest(
        client=client,
        ledger=Ledger(store, registry, register.model, register.alias),
        register=register,
        version=str(version.version),
        value=value,
        holdout_digest=holdout_digest,
        key=key,
        score_champion=score_champion,
    )
    while (outcome := patiently(store, contest.round)) is None:
        pass
    return outcome


@dataclass(frozen=True)
class _Standing:
    """State of the alias that a decision is based on.

    Attributes:
        alias: Version that the alias points to.
        rivals: Versions that the challenger has to beat.
        recorded: Version of the newest confirmed promotion since this challenger first set the alias; None if there is
            none, or if the challenger has not set the alias.
    """

    alias: str | None
    rivals: tuple[str, ...]
    recorded: str | None = None


@dataclass
class _Contest:
    """Comparison of one challenger with the champion, in one or more rounds.

    The alias is set under a lock, which is checked right before and right after. If the second check finds the lock
    lost, the write may have replaced a champion that another process promoted meanwhile. The next round therefore
    compares with all versions that were promoted since.
    """

    client: MlflowClient
    ledger: Ledger
    register: Register
    version: str
    value: float
    holdout_digest: str
    key: Key
    score_champion: Callable[[str], float]
    scores: dict[str, float] = field(default_factory=dict)
    against: str | None = None  # the best rival
    written: set[str] = field(default_factory=set)  # versions that this process gave the alias to
    since: int | None = None  # id of this process's first promotion

    def round(self) -> Outcome | None:
        """Compare and promote; return None if alias or lock changed meanwhile, so that another round is needed."""
        standing = self._standing(_champion(self.client, self.register))
        # Models are scored before the lock is taken, because scoring a big holdout takes longer than the lock lasts.
        for rival in standing.rivals:
            if rival not in self.scores:
                self.scores[rival] = self.score_champion(f"models:/{self.register.model}/{rival}")
        with store_lock(self.ledger.store, self._lock_name(), _LOCK_TTL_S) as lock:
            alias = _champion(self.client, self.register)
            if not self.ledger.settle(lock, alias) or self._standing(alias) != standing:
                return None
            winner = self._winner(standing.rivals)
            if self._moved_by_others(standing):
                winner = standing.alias
            elif winner not in (None, standing.alias) or (self.written and winner != standing.recorded):
                assert winner is not None
                if not self._set(lock, winner, standing.alias):
                    return None
        champion = (
            None if self.against is None else ChampionResult(version=self.against, value=self.scores[self.against])
        )
        return Outcome(self.version, self.value, winner == self.version, champion)

    def _standing(self, alias: str | None) -> _Standing:
        if self.since is None:
            return _Standing(alias, () if alias is None else (alias,))
        promoted = self.ledger.confirmed(self.since)
        rivals = tuple(sorted(set(promoted) - {self.version}))
        return _Standing(alias, rivals, promoted[0] if promoted else None)

    def _moved_by_others(self, standing: _Standing) -> bool:
        """Return whether neither this process nor a recorded promotion gave the alias to its present version."""
        return self.since is not None and standing.alias not in self.written | {standing.recorded}

    def _winner(self, rivals: Sequence[str]) -> str | None:
        mode = self.register.best
        best: str | None = None
        for rival in rivals:
            if best is None or is_better(self.scores[rival], self.scores[best], mode):
                best = rival
        if best is not None or self.since is None:
            self.against = best
        return self.version if is_better(self.value, None if best is None else self.scores[best], mode) else best

    def _set(self, lock: HeldLock, winner: str, previous: str | None) -> bool:
        """Give the alias to a version; return False if the lock was lost before or meanwhile."""
        value = self.value if winner == self.version else self.scores[winner]
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

    def _lock_name(self) -> str:
        registry = hashlib.sha256(self.ledger.registry.encode()).hexdigest()[:12]
        return f"promote:{registry}:{self.register.model}:{self.register.alias}"[:255]


def _champion(client: MlflowClient, register: Register) -> str | None:
    """Return the version that the alias points to."""
    aliases: dict[str, Any] = client.get_registered_model(register.model).aliases
    version = aliases.get(register.alias)
    return None if version is None else str(version)


def describe(outcome: Outcome, register: Register) -> str:
    """Describe an outcome in one line."""
    name = f"{register.model} version {outcome.version}"
    value = f"{register.metric}={outcome.value:.6g}"
    if outcome.champion is None:
        return f"{name} ({value}) is the first {register.alias}"
    against = f"version {outcome.champion.version} ({register.metric}={outcome.champion.value:.6g})"
    return f"{name} ({value}) {'replaces' if outcome.promoted else 'does not beat'} {register.alias} {against}"
