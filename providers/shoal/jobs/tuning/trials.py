"""The trials of a search that have ended, from Optuna's study or from its entries in the store.

The page reads the entries without Optuna, which it does not need otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.jobs.journal import study_logs
from shoal.state import Store
from shoal.state.databases import load_json

if TYPE_CHECKING:
    import optuna

NUMBER, PARAMS, SENT, OUTCOME, REPEATED, LOST_WORKERS = (
    f"shoal:{name}" for name in ("number", "params", "sent", "outcome", "repeated", "lost_workers")
)
"""Attributes of trials: the number by which a trial is seeded, its parameters if they are not those that Optuna
suggested, whether a worker may have them, its outcome before the batch has ended, whether another trial repeats
it, and how many workers were lost while they ran it."""

ERROR, METRICS, ROUNDS, SECONDS, MODEL, MODEL_DIGEST, MLFLOW_RUN = (
    *("error", "metrics", "rounds", "seconds"),
    *("model", "model_digest", "mlflow_run"),
)
"""Attributes of trials that users see."""

_CREATE, _STATE, _ATTRIBUTE = 4, 6, 8
"""Optuna's codes of the entries for a new trial, its state with its value, and an attribute."""

_STATES = {1: "complete", 2: "pruned", 3: "failed"}
"""Optuna's numbers of the states of trials that have ended."""


@dataclass(frozen=True)
class Ended:
    """A trial that has ended.

    Args:
        number: Number of the trial, from 0.
        state: Its state: complete, pruned or failed.
        params: Its parameters.
        value: Value of the deciding metric; None if the trial has none.
        metrics: All metrics.
        rounds: Number of boosting rounds; None for a function.
        seconds: Seconds that a worker has run the trial.
        error: Reason of a failure.
        model: Path or URI of the model that a function has reported.
        model_digest: SHA-256 of the model's file.
        mlflow_run: Id of the MLflow run that the function has opened.
    """

    number: int
    state: str
    params: dict[str, Any]
    value: float | None
    metrics: dict[str, float]
    rounds: int | None
    seconds: float | None
    error: str | None
    model: str | None
    model_digest: str | None
    mlflow_run: str | None = None

    @classmethod
    def of(cls, trial: optuna.trial.FrozenTrial) -> Ended:
        """Return a trial of the study that has ended."""
        state = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, "failed")
        found = trial.user_attrs
        return cls(
            found[NUMBER],
            state,
            found.get(PARAMS, trial.params),
            trial.value,
            found.get(METRICS, {}),
            found.get(ROUNDS),
            found.get(SECONDS),
            found.get(ERROR),
            found.get(MODEL),
            found.get(MODEL_DIGEST),
            found.get(MLFLOW_RUN),
        )


def ended_in(study: optuna.Study) -> list[Ended]:
    """Return the trials of a study that have ended, without those that were repeated, in the order of their numbers."""
    found = (each for each in study.trials if each.state.is_finished() and NUMBER in each.user_attrs)
    return sorted((Ended.of(each) for each in found if REPEATED not in each.user_attrs), key=lambda each: each.number)


def read(store: Store, job_id: str, study: int) -> list[Ended]:
    """Return the trials of a study in the store that have ended, in the order of their numbers."""
    return of_entries(map(load_json, study_logs.read(store, job_id, study)))


def of_entries(entries: Iterable[Mapping[str, Any]]) -> list[Ended]:
    """Return the trials that have ended in the entries of a study, in the order of their numbers."""
    trials: list[dict[str, Any]] = []
    for entry in entries:
        code = entry["op_code"]
        if code == _CREATE:
            trials.append({**entry.get("user_attrs", {}), "state": entry.get("state")})
        elif code == _ATTRIBUTE:
            trials[entry["trial_id"]] |= entry["user_attr"]
        elif code == _STATE:
            values = entry["values"] or [None]
            trials[entry["trial_id"]] |= {"state": entry["state"], "value": values[0]}
    found = [
        Ended(
            each[NUMBER],
            _STATES[each["state"]],
            each.get(PARAMS, {}),
            each.get("value"),
            each.get(METRICS, {}),
            *(each.get(name) for name in (ROUNDS, SECONDS, ERROR, MODEL, MODEL_DIGEST, MLFLOW_RUN)),
        )
        for each in trials
        if each["state"] in _STATES and NUMBER in each and REPEATED not in each
    ]
    return sorted(found, key=lambda each: each.number)
