"""Champion and challenger: a new model takes the alias only when it is better on the same held-out data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError
from shoal.jobs import scoring
from shoal.jobs.locks import store_lock
from shoal.jobs.metrics import Mode
from shoal.jobs.spec import ChampionResult, Register
from shoal.jobs.steps import JobStep, act
from shoal.jobs.tracking import Run
from shoal.jobs.workplace import Workplace
from shoal.state import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOCK_TTL_S = 120.0
"""What is done under the lock is two requests to MLflow, each of which gives up after 120 s at the latest by default;
one that takes longer loses the lock and with it nothing but the certainty that nobody promotes at the same moment."""

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
    place: Workplace,
    run: Run,
    register: Register,
    *,
    model_uri: str,
    model: Any,
    label_col: str,
    input_cols: Sequence[str] = (),
) -> Outcome:
    """Judge a model on the holdout, register it, and give it the alias if it is better than who has it.

    Args:
        place: What is around.
        run: The run that it was logged in.
        register: What to register it as, and how to compare.
        model_uri: The challenger, logged already.
        model: The same, loaded.
        label_col: Label column of the holdout.
        input_cols: Columns for a model that does not name what it takes.

    Raises:
        DataError: The holdout lacks a column that a model needs, or has a null label.
        JobError: The champion cannot be loaded.
    """
    from shoal.data.connector import DataConnector

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
        place.store,
        register,
        model_uri,
        value=value,
        tags={**place.tags, **({_COLUMNS: json.dumps(list(input_cols))} if input_cols else {})},
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
    value: float,
    tags: dict[str, str],
    score_champion: Callable[[str], float],
) -> Outcome:
    """Register a model as a new version, and give it the alias if it is better than who has it.

    Args:
        client: MLflow.
        store: Where the lock is kept: MLflow's aliases have no compare-and-swap.
        register: What to register it as, and how to compare.
        model_uri: The challenger, logged already.
        value: Its metric on the holdout.
        tags: For its version.
        score_champion: The same metric on the same holdout, of the model of a given URI.
    """
    import mlflow

    version = mlflow.register_model(model_uri, register.model, tags={**tags, f"holdout.{register.metric}": repr(value)})
    mode = register.best
    known: dict[str, float] = {}
    while True:
        champion = _champion(client, register)
        if champion is not None and champion not in known:
            known[champion] = score_champion(f"models:/{register.model}/{champion}")
        # Scoring takes as long as the holdout is big, so it is done before; the lock covers what has to be one step.
        with store_lock(store, _lock_name(client, register), _LOCK_TTL_S):
            if _champion(client, register) != champion:
                continue  # another challenger was promoted meanwhile: compare with that one
            against = known.get(champion) if champion is not None else None
            promoted = is_better(value, against, mode)
            if promoted:
                with act(JobStep.PROMOTE):
                    client.set_registered_model_alias(register.model, register.alias, version.version)
        compared = None if champion is None else ChampionResult(version=champion, value=known[champion])
        return Outcome(str(version.version), value, promoted, compared)


def _champion(client: MlflowClient, register: Register) -> str | None:
    """The version that has the alias."""
    aliases: dict[str, Any] = client.get_registered_model(register.model).aliases
    version = aliases.get(register.alias)
    return None if version is None else str(version)


def _lock_name(client: MlflowClient, register: Register) -> str:
    registry = hashlib.sha256(client._registry_uri.encode()).hexdigest()[:12]
    return f"promote:{registry}:{register.model}:{register.alias}"[:255]


def describe(outcome: Outcome, register: Register) -> str:
    """The outcome in one line."""
    name = f"{register.model} version {outcome.version}"
    value = f"{register.metric}={outcome.value:.6g}"
    if outcome.champion is None:
        return f"{name} ({value}) is the first {register.alias}"
    against = f"version {outcome.champion.version} ({register.metric}={outcome.champion.value:.6g})"
    return f"{name} ({value}) {'replaces' if outcome.promoted else 'does not beat'} {register.alias} {against}"
