"""Optuna's journal in the store, on SQLite and PostgreSQL: no gaps, only the newest attempt writes, removed with it."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta

import optuna
import pytest

from shoal.errors import FencedError, InvalidArgumentError, StoreError
from shoal.jobs import prune_jobs
from shoal.jobs.journal import attempts, study_logs
from shoal.jobs.journal.attempts import Key, Order
from shoal.kinds.search import study_storage
from shoal.kinds.search.ask_and_tell import Search
from shoal.kinds.search.study_storage import STUDY, Ended, StudyJournal, ended_in, storage_of
from shoal.state import Store
from shoal.state.schema import JobState

ORDER = Order("job", "retrain", "airflow:d/r", {"fingerprint": "q", "run_config": {}}, {}, None)
OUTCOMES = [
    {"state": "complete", "value": 0.25, "metrics": {"rmse": 0.25}, "rounds": 3},
    {"state": "pruned"},
    {"state": "failed", "error": "why"},
    {"state": "complete", "value": math.inf},
    {"state": "complete", "value": math.nan},
]


def running(store: Store, **changes: object) -> Key:
    job = attempts.ask(store, dataclasses.replace(ORDER, **changes), 0.0)
    key = Key(job.id, job.attempt)
    assert attempts.start(store, key, {}, 0.0)
    return key


def ended(store: Store, key: Key, state: JobState) -> None:
    assert attempts.end(store, key, state, 1.0, seen={JobState.RUNNING}, error="why", result={})
    if state is JobState.SUCCEEDED:
        attempts.collect(store, key, 2.0)


def minimised(storage: optuna.storages.BaseStorage | None) -> optuna.Study:
    study = optuna.create_study(
        storage=storage,
        study_name="search",
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -10, 10)
        trial.suggest_categorical("kind", ["a", None, 3])
        trial.set_user_attr("note", "\0 \ud800")
        for step in range(3):
            trial.report(math.nan if trial.number == 1 else x**2 + step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return math.inf if trial.number == 2 else x**2

    study.optimize(objective, n_trials=12)
    return study


def facts(study: optuna.Study) -> list[str]:
    return [repr((each.number, each.state, each.params, each.value, each.intermediate_values)) for each in study.trials]


def test_a_study_in_the_store_is_the_study_in_memory(either_store, store):
    key = running(store)
    study = minimised(storage_of(StudyJournal(store, key, 1)))

    assert facts(study) == facts(minimised(None))
    again = optuna.load_study(study_name="search", storage=storage_of(StudyJournal(Store(), key, 1)))
    assert facts(again) == facts(study)
    assert again.best_params == study.best_params


def test_the_trials_are_read_without_optuna_as_with_it(store):
    key = running(store)
    journal = StudyJournal(store, key, 1)
    sampler = optuna.samplers.RandomSampler()
    study = optuna.create_study(storage=storage_of(journal), study_name=STUDY, sampler=sampler)
    ended: list[Ended] = []
    search = Search(
        study,
        lambda trial: {"x": trial.suggest_float("x", 0, 1), "two": 2},
        lambda params: None,
        trials=5,
        on_end=ended.append,
    )
    answers: list[str | None] = []
    outcome: dict[str, object] | None = None
    while not search.is_over:
        search.on_question(0, {"outcome": outcome}, answers.append)
        number = len(answers) - 1
        search.on_question(0, {"trial": number, "value": 1.0, "step": 0}, lambda stop: None)
        outcome = {"trial": number, "seconds": 0.5, **OUTCOMES[number]}
        if number == 4:
            search.on_question(0, {"outcome": outcome}, answers.append)
    journal.flush()

    assert answers[-1] is None
    assert study_storage.read_trials(store, "job", 1) == ended == ended_in(study)
    assert [(each.state, each.value) for each in ended] == [
        ("complete", 0.25), ("pruned", 1.0), ("failed", None), ("complete", math.inf), ("failed", None)
    ]  # fmt: skip
    assert ended[0].params == {"x": study.trials[0].params["x"], "two": 2}
    assert [each.error for each in ended[2:]] == ["why", None, "the value of the deciding metric is NaN"]


def test_numbers_have_no_gaps_and_a_repeated_append_adds_nothing(either_store, store):
    key = running(store)

    assert study_logs.append(store, key, 1, ["1", "2"], None) == 2
    assert study_logs.append(store, key, 1, ["3"], 2) == 3
    assert study_logs.append(store, key, 1, ["3"], 2) == 3  # the reply was lost
    assert study_logs.append(store, key, 1, ["3"], 3) == 4

    assert study_logs.read(store, "job", 1) == ["1", "2", "3", "3"]
    assert study_logs.read(store, "job", 1, 2) == ["3", "3"]
    with pytest.raises(StoreError, match="has 4 entries instead of 2"):
        study_logs.append(store, key, 1, ["other"], 2)
    with pytest.raises(InvalidArgumentError, match="1,048,577 bytes"):
        study_logs.append(store, key, 1, ["x" * (2**20 + 1)], None)


def test_only_the_newest_running_attempt_may_append(either_store, store):
    first = running(store)
    journal = StudyJournal(store, first, 1)
    journal.append_logs([{"op_code": 0}])
    journal.append_logs([{"op_code": 7}])
    ended(store, first, JobState.FAILED)
    second = running(store)

    with pytest.raises(FencedError, match="attempt 1 of job job has ended, or a later attempt continues"):
        journal.flush()

    later = StudyJournal(store, second, 1)
    later.append_logs([{"op_code": 6}])
    assert list(later.read_logs(0)) == [{"op_code": 0}, {"op_code": 6}]


def test_reports_are_written_with_the_end_of_their_trial(store):
    key = running(store)
    journal = StudyJournal(store, key, 1)
    journal.append_logs([{"op_code": 0}])
    assert list(journal.read_logs(0)) == [{"op_code": 0}]
    for step in range(3):
        journal.append_logs([{"op_code": 7, "step": step}])
        assert list(journal.read_logs(1 + step)) == [{"op_code": 7, "step": step}]
    assert len(study_logs.read(store, "job", 1)) == 1

    journal.append_logs([{"op_code": 6}])

    assert [len(list(journal.read_logs(first))) for first in (0, 2, 4)] == [5, 3, 1]
    assert len(study_logs.read(store, "job", 1)) == 5
    journal.append_logs([{"op_code": 7, "step": 9}])
    assert len(list(journal.read_logs(0))) == 6  # also what is not written yet
    journal.flush()
    assert len(study_logs.read(store, "job", 1)) == 6


def test_an_attempt_after_a_failure_continues_the_study(store):
    first = running(store)
    assert study_logs.study_of(store, first) == 1
    study_logs.append(store, first, 1, ["{}"], None)
    ended(store, first, JobState.FAILED)
    second = running(store)
    ended(store, second, JobState.FAILED)  # before it wrote
    third = running(store)

    assert [study_logs.study_of(store, key) for key in (first, second, third)] == [1, 1, 1]


@pytest.mark.parametrize("why", ["succeeded", "another spec"])
def test_an_attempt_begins_a_study_of_its_own(store, why):
    first = running(store)
    study_logs.append(store, first, 1, ["{}"], None)
    ended(store, first, JobState.SUCCEEDED if why == "succeeded" else JobState.FAILED)

    second = running(store, **({} if why == "succeeded" else {"spec": {**ORDER.spec, "fingerprint": "other"}}))

    assert study_logs.study_of(store, second) == 2


def test_a_study_is_removed_with_its_last_attempt(either_store, store):
    first = running(store, spec={**ORDER.spec, "run_config": {"job_id": "job"}})
    study_logs.append(store, first, 1, ["{}"], None)
    ended(store, first, JobState.SUCCEEDED)
    second = running(store, spec={**ORDER.spec, "run_config": {"job_id": "job"}, "fingerprint": "other"})
    study_logs.append(store, second, 2, ["{}"], None)
    ended(store, second, JobState.FAILED)
    third = running(store, spec={**ORDER.spec, "run_config": {"job_id": "job"}, "fingerprint": "other"})
    ended(store, third, JobState.FAILED)
    later = timedelta(days=40).total_seconds()

    def left() -> list[int]:
        return [study for study in (1, 2) if study_logs.read(store, "job", study)]

    assert [each.attempt for each in prune_jobs(clock=lambda: later)] == [2]  # the job has a chosen id
    assert left() == [1, 2]  # the third attempt has continued the second study
    unchosen = running(store, job_id="other")
    study_logs.append(store, unchosen, 1, ["{}"], None)
    ended(store, unchosen, JobState.FAILED)
    assert [each.job_id for each in prune_jobs(clock=lambda: later)] == ["other"]
    assert study_logs.read(store, "other", 1) == []
