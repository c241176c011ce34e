"""Champion and challenger: a new model takes the alias only when it is better on the same held-out data."""

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
from shoal.jobs.journal import attempts
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
"""What is done under the lock is two requests to MLflow, each of which gives up after 120 s at the latest by default. A
holder that takes longer loses the lock, and repairs what it did without it."""

_COLUMNS = "shoal.input_cols"
"""Tag of a version: what a model takes whose signature does not say."""


@dataclass(frozen=True)
class Outcome:
    """What became of a challenger.

    Attributes:
        version: Its version in the registry.
        value: Its metric on the holdout.
        promoted: Whether it has the alias now.
        champion: What it was compared to; None where nothing had the alias.
    """

    version: str
    value: float
    promoted: bool
    champion: ChampionResult | None


def is_better(challenger: float, champion: float | None, mode: Mode) -> bool:
    """Whether a challenger takes the champion's place.

    Only what is strictly better does: of two that are as good, the one that serves stays. A metric that is no number
    never wins.

    Args:
        challenger: Its metric.
        champion: The champion's metric on the same data; None where there is no champion.
        mode: Whether less or more is better.
    """
    if math.isnan(challenger):
        return False
    if champion is None or math.isnan(champion):
        return True
    return challenger < champion if mode == "min" else challenger > champion


def check_holdout(register: Register, label_col: str, input_cols: Sequence[str]) -> None:
    """Refuse a holdout that cannot judge, before hours of training.

    Args:
        register: What names it.
        label_col: Its label column.
        input_cols: Columns that the model takes, as far as they are known.

    Raises:
        DataError: It is not there, has no rows, or lacks a column.
    """
    from shoal.data.connector import DataConnector

    holdout: DataConnector = DataConnector.from_spec(register.holdout)
    if missing := sorted({*input_cols, label_col} - set(holdout.schema().names)):
        raise DataError(f"the holdout lacks what the model needs: {', '.join(missing)}")
    if not holdout.num_rows():
        raise DataError("the holdout has no rows")


def enter(
    store: Store,
    key: Key,
    run: Run,
    register: Register,
    *,
    tags: Mapping[str, str],
    model_uri: str,
    model: Any,
    label_col: str,
    input_cols: Sequence[str] = (),
) -> Outcome:
    """Judge a model on the holdout, register it, and give it the alias if it is better than who has it.

    Args:
        store: Where the attempt's row is.
        key: The attempt.
        run: The run that it was logged in.
        register: What to register it as, and how to compare.
        tags: Of the registered version.
        model_uri: The challenger, logged already.
        model: The same, loaded.
        label_col: Label column of the holdout.
        input_cols: Columns for a model that does not name what it takes.

    Raises:
        DataError: The holdout lacks a column that a model needs, or has a null label.
        JobError: The champion cannot be loaded, or this attempt has been ended or replaced by a newer one.
    """
    from shoal.data.connector import DataConnector

    if not patiently(store, lambda: attempts.is_current(store, key)):
        raise JobError(
            f'attempt {key.attempt} of job "{key.job_id}" has been ended or replaced by a newer one: '
            "its model is not registered"
        )
    holdout: DataConnector = DataConnector.from_spec(register.holdout)

    def champions(uri: str) -> float:
        # One that does not name its columns was trained on its own, in its own order.
        own = run.client.get_model_version(register.model, uri.rpartition("/")[2]).tags.get(_COLUMNS)
        columns = json.loads(own) if own else input_cols
        try:
            return scoring.score(scoring.load(uri), holdout, label_col, register.metric, input_cols=columns)
        except DataError as error:
            raise DataError(f"the champion {uri} cannot be judged: {error}") from error

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
        score_champion=champions,
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
    """Register a model as a new version, and give it the alias if it is better than who has it.

    Args:
        client: MLflow.
        store: Where the lock and the record of promotions are kept: MLflow's aliases have no compare-and-swap.
        register: What to register it as, and how to compare.
        model_uri: The challenger, logged already.
        key: The attempt that trained it.
        value: Its metric on the holdout.
        holdout_digest: Tells the holdout's rows from others.
        tags: For its version.
        score_champion: The same metric on the same holdout, of the model of a given URI.
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
    """What a decision rests on.

    Attributes:
        alias: The version that has the alias.
        rivals: The versions that the challenger has to beat.
        recorded: The last promotion since this challenger set the alias; None before, and where there is none.
    """

    alias: str | None
    rivals: tuple[str, ...]
    recorded: str | None = None


@dataclass
class _Contest:
    """One challenger's way to the alias, in rounds.

    The alias is set under a lock that is checked right before. Where the check right after finds the lock lost, the
    write may have displaced a champion that was promoted meanwhile: the next round compares with all that were.
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
    written: set[str] = field(default_factory=set)  # versions that the alias was set to, and maybe too late
    since: int | None = None  # id of the first such promotion

    def round(self) -> Outcome | None:
        """Compare and promote; None when something changed meanwhile, and another round is needed."""
        standing = self._standing(_champion(self.client, self.register))
        # Scoring takes as long as the holdout is big, so it is done before; the lock covers what has to be one step.
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
        """Whether neither this challenger nor any recorded promotion gave the alias to the version that has it."""
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
        """Give the alias to a version; False when the lock was lost before or meanwhile."""
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
    """The version that has the alias."""
    aliases: dict[str, Any] = client.get_registered_model(register.model).aliases
    version = aliases.get(register.alias)
    return None if version is None else str(version)


def describe(outcome: Outcome, register: Register) -> str:
    """The outcome in one line."""
    name = f"{register.model} version {outcome.version}"
    value = f"{register.metric}={outcome.value:.6g}"
    if outcome.champion is None:
        return f"{name} ({value}) is the first {register.alias}"
    against = f"version {outcome.champion.version} ({register.metric}={outcome.champion.value:.6g})"
    return f"{name} ({value}) {'replaces' if outcome.promoted else 'does not beat'} {register.alias} {against}"
