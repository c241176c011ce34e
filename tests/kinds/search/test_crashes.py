"""A driver is killed before or after each of its writes: the next one ends the search with the same trials."""

from __future__ import annotations

from collections import deque
from typing import Any

import optuna
import pytest

from shoal.jobs.journal import attempts, study_logs
from shoal.jobs.journal.attempts import Key, Order
from shoal.kinds.search import study_storage
from shoal.kinds.search.ask_and_tell import Search
from shoal.kinds.search.study_storage import STUDY, StudyJournal, storage_of
from shoal.state import Store
from shoal.state.schema import JobState

ORDER = Order("job", "retrain", "airflow:d/r", {"fingerprint": "q", "run_config": {}}, {}, None)
TRIALS = 5

pytestmark = pytest.mark.crash


class Killed(BaseException):
    """The driver's process is gone."""


class FragileJournal(StudyJournal):
    """A journal whose process is killed before or after one of its writes."""

    writes = 0
    die_at: int | None = None
    after = False

    def flush(self) -> None:
        self.writes += 1
        if self.writes == self.die_at and not self.after:
            raise Killed
        super().flush()
        if self.writes == self.die_at:
            raise Killed


class Workers:
    """Workers that run trials in turns, two reports each; the function of a worker is x * x. Trial 1 ends its
    worker."""

    def __init__(self, search: Search, number: int) -> None:
        self.search = search
        self.turns = deque(range(number))
        self.open: dict[int, tuple[Any, int]] = {}
        self.over: set[int] = set()
        self.ran: list[int] = []
        for rank in range(number):
            search.on_question(rank, {"outcome": None}, self.reply(rank))

    def reply(self, rank: int) -> Any:
        def answer(sent: str | None) -> None:
            if sent is None:
                self.over.add(rank)
                return
            import base64
            import pickle

            trial = pickle.loads(base64.b64decode(sent))
            self.ran.append(trial.number)
            self.open[rank] = (trial, 0)

        return answer

    def run(self) -> None:
        while len(self.over) < len(self.turns):
            rank = self.turns[0]
            self.turns.rotate(-1)
            if rank not in self.open:
                continue
            trial, step = self.open[rank]
            value = trial.params["x"] ** 2
            if step < 2:
                stops: list[bool] = []
                self.search.on_question(
                    rank, {"trial": trial.number, "value": value + 2 - step, "step": step}, stops.append
                )
                self.open[rank] = (trial, step + 1)
                if not stops[0]:
                    continue
            del self.open[rank]
            if trial.number == 1:
                assert self.search.worker_lost(rank, "its process ended with exit code 3")
                self.search.on_question(rank, {"outcome": None}, self.reply(rank))
                continue
            outcome = {"trial": trial.number, "state": "complete" if step == 2 else "pruned", "value": value}
            if trial.params["x"] > 4:
                outcome = {"trial": trial.number, "state": "failed", "error": "too large"}
            self.search.on_question(rank, {"outcome": outcome}, self.reply(rank))


def attempt(store: Store, workers: int, batch: int | None, sampler: Any, die_at: int | None, after: bool) -> Workers:
    job = attempts.ask(store, ORDER, 0.0)
    key = Key(job.id, job.attempt)
    assert attempts.start(store, key, {}, 0.0)
    journal = FragileJournal(store, key, study_logs.study_of(store, key))
    journal.die_at, journal.after = die_at, after
    found: Workers | None = None
    try:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
        study = optuna.create_study(
            storage=storage_of(journal), study_name=STUDY, pruner=pruner, sampler=sampler, load_if_exists=True
        )
        search = Search(
            study, lambda trial: {"x": trial.suggest_float("x", -5, 5), "y": trial.suggest_int("y", 1, 3)},
            lambda params: None, TRIALS, seed=3, batch=batch, flush=journal.flush,
        )  # fmt: skip
        found = Workers(search, workers)
        found.run()
    except Killed:
        attempts.end(store, key, JobState.FAILED, 1.0, seen={JobState.RUNNING}, error="killed")
        raise
    attempts.end(store, key, JobState.SUCCEEDED, 1.0, seen={JobState.RUNNING}, result={})
    attempts.collect(store, key, 1.0)
    return found


CASES = [
    (1, None, lambda: optuna.samplers.TPESampler(n_startup_trials=2)),
    (2, 2, lambda: optuna.samplers.TPESampler(n_startup_trials=2)),
    (2, None, optuna.samplers.RandomSampler),
]


@pytest.mark.parametrize(("workers", "batch", "sampler"), CASES, ids=["one", "batches", "two"])
def test_a_search_that_was_killed_at_any_write_ends_with_the_same_trials(store, workers, batch, sampler):
    attempt(store, workers, batch, sampler(), None, False)
    expected = study_storage.read_trials(store, "job", 1)
    assert [each.number for each in expected] == list(range(TRIALS))
    assert expected[1].error == "the worker of the trial was lost in 2 attempts: its process ended with exit code 3"
    pruned = workers == 2 and batch is None  # what a pruner sees depends on which trial was first
    for place in range(200):
        write, after = place // 2 + 1, bool(place % 2)
        first = attempts.find_latest(store, "job").attempt + 1
        try:
            attempt(store, workers, batch, sampler(), write, after)
        except Killed:
            done = {each.number for each in study_storage.read_trials(store, "job", first)}
            continued = attempt(store, workers, batch, sampler(), None, False)
            assert not done & set(continued.ran), (write, after)
        else:
            return
        found = study_storage.read_trials(store, "job", first if study_logs.read(store, "job", first) else first + 1)
        if pruned:
            assert [each.params for each in found] == [each.params for each in expected], (write, after)
        else:
            assert found == expected, (write, after)
    pytest.fail("a search has fewer writes than that")
