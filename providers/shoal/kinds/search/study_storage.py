"""Keep an Optuna study in the store, as the two methods that `optuna.storages.JournalStorage` asks of a backend.

Optuna's own storage in a database cannot be used, because its migrations and those of shoal use the same table. The
page reads the trials that have ended from the entries in the store, without Optuna.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.errors import MissingExtraError
from shoal.jobs.journal import study_logs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import patiently
from shoal.lazy_imports import optuna
from shoal.state import Store
from shoal.state.databases import dump_json, load_json

if TYPE_CHECKING:
    from shoal.training.boosting.params import Direction


STUDY = "search"
"""Name of the study in its storage, which has only this study. Optuna's hyperband pruner depends on the name."""

_DURABLE = frozenset({0, 6})
"""Optuna's codes of the entries that are written at once: a new study, and the end of a trial. All others wait for the
next of these or for `flush`: a transaction of SQLite takes 9 ms on a slow disk, and a search has thousands of reports.
A trial whose driver was killed before its end is repeated, so its reports are not needed."""


class StudyJournal:
    """Journal of one study, as a backend of `optuna.storages.JournalStorage`.

    Only the driver of the job's newest attempt may append. While the store cannot be used, an append is repeated.

    Args:
        store: Store that has the journal.
        key: Attempt that reads, and writes while it runs.
        study: Number of the attempt that has begun the study; see `shoal.jobs.journal.study_logs.study_of`.
    """

    def __init__(self, store: Store, key: Key, study: int) -> None:
        self._store = store
        self._key = key
        self._study = study
        self._written: int | None = None
        """Number of entries in the store; None before this process has appended any."""
        self._recent: list[str] = []
        """The newest entries, which Optuna has not read yet, or which are not in the store yet."""
        self._first_recent = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add entries to the journal. Only a new study and the end of a trial are written at once.

        Raises:
            FencedError: The attempt is not running, or is not the newest attempt of its job.
        """
        if self._written is None:
            self._written = self._first_recent = study_logs.append(self._store, self._key, self._study, [], None)
        self._recent += map(dump_json, logs)
        if any(log["op_code"] in _DURABLE for log in logs):
            self.flush()

    def flush(self) -> None:
        """Write the entries that are not in the store yet, in one transaction.

        Raises:
            FencedError: The attempt is not running, or is not the newest attempt of its job.
        """
        if self._written is None:
            return
        written, entries = self._written, self._recent[self._written - self._first_recent :]
        if entries:
            self._written = patiently(
                self._store, lambda: study_logs.append(self._store, self._key, self._study, entries, written)
            )

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the entries from the given number on."""
        if self._written is None or log_number_from < self._first_recent:
            entries = patiently(
                self._store, lambda: study_logs.read(self._store, self._key.job_id, self._study, log_number_from)
            )
            if self._written is not None:
                entries += self._recent[self._written - self._first_recent :]
            return [load_json(entry) for entry in entries]
        del self._recent[: (kept := min(log_number_from, self._written)) - self._first_recent]
        self._first_recent = kept
        return [load_json(entry) for entry in self._recent[log_number_from - kept :]]


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("optuna", "tune") from error


def copy_of(store: Store, key: Key, study: int) -> optuna.Study:
    """Return a copy in memory of a study in the store, which a user may change."""
    require_optuna()
    memory = optuna.storages.InMemoryStorage()
    shown = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the copy is no new study for the user
    try:
        optuna.copy_study(
            from_study_name=STUDY,
            from_storage=storage_of(StudyJournal(store, key, study)),
            to_storage=memory,
            to_study_name=STUDY,
        )
    finally:
        optuna.logging.set_verbosity(shown)
    return optuna.load_study(study_name=STUDY, storage=memory)


def storage_of(journal: StudyJournal) -> optuna.storages.BaseStorage:
    """Return Optuna's storage of a study in the store."""
    require_optuna()
    backend: Any = journal
    return optuna.storages.JournalStorage(backend)


NUMBER, PARAMS, SENT, OUTCOME, REPEATED, LOST_WORKERS = (
    f"shoal:{name}" for name in ("number", "params", "sent", "outcome", "repeated", "lost_workers")
)
"""Attributes of trials: the number by which a trial is seeded, its parameters if they are not those that Optuna
suggested, whether a worker may have them, its outcome before the batch has ended, whether another trial repeats
it, and how many workers were lost while they ran it."""

ERROR, METRICS, ROUNDS, SECONDS, MODEL, MODEL_DIGEST, MLFLOW_RUN = SHOWN = (
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
        return cls.described(trial.user_attrs, state, trial.value, trial.params)

    @classmethod
    def described(cls, found: Mapping[str, Any], state: str, value: float | None, suggested: dict[str, Any]) -> Ended:
        """Return a trial by the attributes that shoal has set, its state, its value and its suggested parameters."""
        others = (found.get(name) for name in (ROUNDS, SECONDS, ERROR, MODEL, MODEL_DIGEST, MLFLOW_RUN))
        return cls(found[NUMBER], state, found.get(PARAMS, suggested), value, found.get(METRICS, {}), *others)


def best_first(trials: Iterable[Ended], direction: Direction) -> list[Ended]:
    """Return the complete trials, the best first, then those that were pruned, then those that failed; equal ones in
    the order of their numbers."""
    sign = -1 if direction == "maximize" else 1
    rank = {"complete": 0, "pruned": 1}
    return sorted(trials, key=lambda each: (rank.get(each.state, 2), sign * (each.value or 0.0), each.number))


def direction_of(study: optuna.Study) -> Direction:
    """Return the direction of a study's deciding metric."""
    return "maximize" if study.direction.name == "MAXIMIZE" else "minimize"


def ended_in(study: optuna.Study) -> list[Ended]:
    """Return the trials of a study that have ended, without those that were repeated, in the order of their numbers."""
    found = (each for each in study.trials if each.state.is_finished() and NUMBER in each.user_attrs)
    return sorted((Ended.of(each) for each in found if REPEATED not in each.user_attrs), key=lambda each: each.number)


def read_trials(store: Store, job_id: str, study: int) -> list[Ended]:
    """Return the trials of a study in the store that have ended, in the order of their numbers."""
    trials: list[dict[str, Any]] = []
    for entry in map(load_json, study_logs.read(store, job_id, study)):
        code = entry["op_code"]
        if code == _CREATE:
            trials.append({**entry.get("user_attrs", {}), "state": entry.get("state")})
        elif code == _ATTRIBUTE:
            trials[entry["trial_id"]] |= entry["user_attr"]
        elif code == _STATE:
            values = entry["values"] or [None]
            trials[entry["trial_id"]] |= {"state": entry["state"], "value": values[0]}
    found = [
        Ended.described(each, _STATES[each["state"]], each.get("value"), {})
        for each in trials
        if each["state"] in _STATES and NUMBER in each and REPEATED not in each
    ]
    return sorted(found, key=lambda each: each.number)
