"""Snowflake's names of a search, on a pool without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from shoal import ComputePool
from shoal.compat.snowflake import get_tuner_context, search_algorithm, tune
from shoal.data import DataConnector
from shoal.errors import InvalidArgumentError
from tests.support.homes import new_home
from tests.support.pool_processes import nothing_left

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    with new_home():
        pool = ComputePool("local://snow?cpus_per_node=2&ray=false").up()
        yield pool
        pool.down()
        nothing_left()


def train_func() -> None:
    context = get_tuner_context()
    config = context.get_hyper_params()
    rows = context.get_dataset_map()["train"].to_pandas()
    score = -abs(config["x"] - 2) + rows["a"].sum() * 0 + config["fixed"]
    context.report(metrics={"score": score, "type": float(isinstance(config["x"], float))}, model=dict(config))


def run(space: dict[str, Any], **options: Any) -> tune.TunerResults:
    config = tune.TunerConfig(metric="score", mode="max", **options)
    data = DataConnector.from_dataframe(pd.DataFrame({"a": [1.0, 2.0]}))
    return tune.Tuner(train_func, {"fixed": 5, **space}, config).run(dataset_map={"train": data})


def test_a_grid_has_a_trial_for_each_combination(pool):
    found = run({"x": [1, 2, 3], "y": ["a", "b"]}, search_alg=tune.search.GridSearch(), num_trials=1)

    assert len(found.results) == 6
    assert {"score", "trial_id", "time_total_s", "config/x", "config/y", "config/fixed"} <= set(found.results)
    assert isinstance(found.best_result, pd.DataFrame)
    assert len(found.best_result) == 1
    assert found.best_result["config/x"].iloc[0] == 2
    assert found.best_result["score"].iloc[0] == 5
    assert found.best_model == {"x": 2, "y": "a", "fixed": 5}


def test_random_and_bayesian_searches(pool):
    space = {"x": tune.randint(0, 5)}
    found = run(space, search_alg=search_algorithm.RandomSearch(random_state=1), num_trials=4)
    assert set(found.results["config/x"]) <= set(range(5))
    assert set(found.results["type"]) == {0.0}

    bayes = search_algorithm.BayesOpt(utility_kwargs={"kind": "ucb", "kappa": 2.5, "xi": 0.0})
    found = run(space, search_alg=bayes, max_concurrent_trials=1, resource_per_trial={"CPU": 1})
    assert len(found.results) == 5
    assert set(found.results["type"]) == {1.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tune.TunerConfig(metric="a", mode="maximize"), 'mode must be "min" or "max"'),
        (lambda: tune.TunerConfig(metric="a", mode="max", search_alg="grid"), "search_alg must be"),
        (lambda: tune.TunerConfig("a", "max", resource_per_trial={"TPU": 1}), "resource_per_trial"),
        (lambda: tune.Tuner(train_func, {"x": tune.uniform(0, 1)}, grid()), "GridSearch needs lists"),
        (lambda: tune.Tuner(train_func, {"x": tune.choice([1])}, bayes()), "BayesOpt needs numbers"),
        (lambda: tune.Tuner(train_func, {"x": tune.uniform(1, 0)}, bayes()), "is larger than high"),
        (get_tuner_context, "runs no trial"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def grid() -> tune.TunerConfig:
    return tune.TunerConfig("a", "max", search_algorithm.GridSearch())


def bayes() -> tune.TunerConfig:
    return tune.TunerConfig("a", "max", search_algorithm.BayesOpt())
