"""With batches, a search does not depend on the order in which its workers come forward."""

from __future__ import annotations

import base64
import pickle
import random
from typing import Any

import optuna
import pytest

from shoal.kinds.search.ask_and_tell import Search, pruner_named, sampler_named
from shoal.kinds.search.study_storage import STUDY, Ended

WORKERS, TRIALS, STEPS = 3, 45, 30


def searched(pruner: optuna.pruners.BasePruner, order: int, *, losses: int = 0) -> list[Ended]:
    """Run a search whose workers report in a random order, and lose some workers."""
    chosen = random.Random(order)
    sampler = sampler_named("tpe")
    study = optuna.create_study(study_name=STUDY, sampler=sampler, pruner=pruner)

    def suggest(trial: Any) -> dict[str, float]:
        return {name: trial.suggest_float(name, -5, 5) for name in "xz"}

    search = Search(study, suggest, lambda params: None, TRIALS, seed=1, batch=WORKERS)
    running: dict[int, list[Any]] = {}

    def ask(rank: int, outcome: dict[str, Any] | None = None) -> None:
        def begin(sent: str | None) -> None:
            if sent is not None:
                running[rank] = [pickle.loads(base64.b64decode(sent)), 0]

        search.on_question(rank, {"outcome": outcome}, begin)

    for rank in range(WORKERS):
        ask(rank)
    while running:
        rank = chosen.choice(sorted(running))
        trial, step = running[rank]
        if losses and step == 5:
            losses -= 1
            del running[rank]
            assert search.worker_lost(rank, "its process was killed")
            ask(rank)
            continue
        value = (trial.params["x"] - 1) ** 2 + trial.params["z"] ** 2 + 3 / (step + 1)
        answers: list[bool] = []
        search.on_question(rank, {"trial": trial.number, "value": value, "step": step}, answers.append)
        running[rank][1] += 1
        if answers[0] or step + 1 == STEPS:
            del running[rank]
            ask(rank, {"trial": trial.number, "state": "pruned" if answers[0] else "complete", "value": value})
    assert search.is_over
    return search.ended


@pytest.mark.parametrize("name", ["median", "halving", "hyperband"])
def test_the_order_of_the_workers_changes_no_trial_of_a_search_in_batches(name):
    found = [
        [(each.params, each.state, each.value) for each in searched(pruner_named(name), order)] for order in (1, 2, 3)
    ]

    assert found[0] == found[1] == found[2]
    assert {"pruned", "complete"} == {state for _, state, _ in found[0]}


@pytest.mark.parametrize("name", ["median", "halving", "hyperband"])
def test_a_trial_that_is_repeated_changes_no_other_trial_of_a_search_in_batches(name):
    undisturbed, disturbed = (
        [(each.params, each.state, each.value) for each in searched(pruner_named(name), order, losses=losses)]
        for order, losses in ((1, 0), (2, 2))
    )
    assert disturbed == undisturbed
