"""Trials in real workers without Ray, against the plain library in this process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightgbm
import optuna
import pandas as pd
import pytest
import xgboost

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError, TrainingError
from shoal.kinds.search import engine
from shoal.kinds.search.ask_and_tell import sampler_named, seeded
from shoal.kinds.search.spec import Range, SearchCode, TuneJobSpec
from shoal.kinds.search.study_storage import STUDY, Ended
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.trials import with_params
from shoal.training.gang.gang import end_gangs
from shoal.training.pickling import pickled
from shoal.training.trial_worker import TrialPruned
from tests.kinds.search.conftest import COLUMNS
from tests.support import boosting_metrics
from tests.support.boosting_metrics import CASES, MetricCase
from tests.support.without_ray import nodes_without_ray

pytestmark = pytest.mark.processes

SPACE = {
    "max_depth": {"type": "int", "low": 2, "high": 6},
    "learning_rate": {"low": 0.05, "high": 0.5, "log": True},
}


def spec_of(rows: Path, framework: str = "xgboost", **changes: Any) -> TuneJobSpec:
    train = {
        "framework": framework,
        "dataset": DatasetSpec(paths=(str(rows / "train.parquet"),)),
        "input_cols": COLUMNS,
        "label_col": "y",
        "n_estimators": 12,
        **changes.pop("train", {}),
    }
    fields = {
        "train": train,
        "holdout": DatasetSpec(paths=(str(rows / "holdout.parquet"),)),
        "space": SPACE,
        "trials": 6,
        "pruner": "none",
        "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1},
        **changes,
    }
    return TuneJobSpec.parse(fields)


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    """One node of two CPUs. The workers of a search are kept for the next one."""
    with nodes_without_ray(2):
        yield
        end_gangs()


def found_by(spec: TuneJobSpec, code: SearchCode | None = None, **options: Any) -> engine.Found:
    return engine.run(spec, code or SearchCode(), UserCode(), **options)


def plain_xgboost(rows: Path, params: dict[str, Any], stopping: int | None) -> float:
    train, holdout = (pd.read_parquet(rows / f"{name}.parquet") for name in ("train", "holdout"))
    bins = params.get("max_bin", 256)
    matrix = xgboost.QuantileDMatrix(train[list(COLUMNS)], train.y, max_bin=bins)
    evaluated: dict[str, Any] = {}
    booster = xgboost.train(
        {**params, "nthread": 1, "seed": 0},
        matrix,
        12,
        evals=[(xgboost.QuantileDMatrix(holdout[list(COLUMNS)], holdout.y, ref=matrix, max_bin=bins), "holdout")],
        evals_result=evaluated,
        verbose_eval=False,
        early_stopping_rounds=stopping,
    )
    best = booster.best_iteration if stopping else -1
    return evaluated["holdout"]["rmse"][best]


def plain_lightgbm(rows: Path, params: dict[str, Any], stopping: int | None) -> float:
    train, holdout = (pd.read_parquet(rows / f"{name}.parquet") for name in ("train", "holdout"))
    fixed = {"deterministic": True, "force_col_wise": True, "num_threads": 1, "verbosity": -1, "seed": 0}
    data = lightgbm.Dataset(train[list(COLUMNS)], train.y, params={"feature_pre_filter": False, **params})
    evaluated: dict[str, Any] = {}
    booster = lightgbm.train(
        {**fixed, **params},
        data,
        12,
        [data.create_valid(holdout[list(COLUMNS)], holdout.y)],
        ["holdout"],
        callbacks=[
            lightgbm.record_evaluation(evaluated),
            *([lightgbm.early_stopping(stopping, verbose=False)] if stopping else []),
        ],
    )
    return evaluated["holdout"]["l2"][booster.best_iteration - 1 if stopping else -1]


PLAIN: dict[str, Callable[..., float]] = {"xgboost": plain_xgboost, "lightgbm": plain_lightgbm}


@pytest.mark.parametrize("stopping", [None, 2])
@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_each_trial_has_the_value_of_the_plain_library_with_its_parameters(tuned_rows, framework, stopping):
    lines: list[Ended] = []
    spec = spec_of(tuned_rows, framework, early_stopping_rounds=stopping)

    found = found_by(spec, on_end=lines.append)

    assert [each.number for each in lines] == [each.number for each in found.ended] == list(range(6))
    for trial in found.ended:
        assert trial.value == pytest.approx(PLAIN[framework](tuned_rows, trial.params, stopping), rel=1e-6)
    assert found.best.value == min(each.value for each in found.ended if each.value is not None)
    assert found.direction == "minimize"
    assert len({str(each.params) for each in found.ended}) == 6


def test_suggestions_are_those_of_optuna_and_the_same_again(tuned_rows):
    spec = spec_of(tuned_rows, trials=8, space={"max_depth": SPACE["max_depth"]}, sampler="random")
    first, again = found_by(spec), found_by(spec)
    others = found_by(spec.model_copy(update={"seed": 1}))

    assert [each.params for each in first.ended] == [each.params for each in again.ended]
    assert [each.params for each in first.ended] != [each.params for each in others.ended]


def test_a_trial_ends_early_when_its_metric_is_worse(tuned_rows):
    space = {"learning_rate": [0.5, 0.4, 0.3, 0.0001]}
    spec = spec_of(tuned_rows, space=space, sampler="grid", pruner=None, trials=9)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=3)
    storage = optuna.storages.InMemoryStorage()

    found = found_by(spec, SearchCode(pruner=pruner), storage=storage)

    assert [(each.state, each.params["learning_rate"]) for each in found.ended] == [
        ("complete", 0.5), ("complete", 0.4), ("pruned", 0.3), ("pruned", 0.0001)
    ]  # fmt: skip
    study = optuna.load_study(study_name=STUDY, storage=storage)
    assert [len(each.intermediate_values) for each in study.trials] == [12, 12, 4, 4]


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_data_are_read_only_for_the_first_trial(tuned_rows, tmp_path, framework):
    rows = tmp_path / "rows"
    shutil.copytree(tuned_rows, rows)
    fixed = {"min_data_in_leaf": 7} if framework == "lightgbm" else {}
    spec = spec_of(rows, framework, trials=3, train={"params": fixed})

    found = found_by(spec, on_end=lambda ended: None if ended.number else shutil.rmtree(rows))

    assert [each.state for each in found.ended] == ["complete"] * 3
    for trial in found.ended:
        assert trial.value == pytest.approx(PLAIN[framework](tuned_rows, {**trial.params, **fixed}, None), rel=1e-6)


def test_trials_with_other_bins_have_the_values_of_the_plain_library(tuned_rows):
    space = {"min_data_in_leaf": [5, 40], "max_bin": [15, 255]}
    for framework, varied in (("xgboost", {"max_bin": [16, 64, 256]}), ("lightgbm", space)):
        found = found_by(spec_of(tuned_rows, framework, space=varied, sampler="grid"))
        for trial in found.ended:
            assert trial.value == pytest.approx(PLAIN[framework](tuned_rows, trial.params, None), rel=1e-6)


def test_trials_with_random_rows_have_the_values_of_a_training_with_their_parameters(tuned_rows):
    """Such a training has seeds of its own in each segment, and LightGBM reads scores anew."""
    fixed = {"bagging_fraction": 0.5, "bagging_freq": 1, "seed": 3}
    spec = spec_of(
        tuned_rows,
        "lightgbm",
        train={"params": fixed, "n_estimators": 9, "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1}},
        space={"learning_rate": [0.1, 0.3], "num_leaves": [4, 8]},
        sampler="grid",
        run_config={"checkpoint_every": 4},
    )

    found = found_by(spec)

    for trial in found.ended:
        trained = train(with_params(spec.trial_request(), trial.params))
        assert trained.eval_results["holdout"]["l2"][-1] == trial.value
    assert len({trial.value for trial in found.ended}) == 4


def test_a_refused_parameter_fails_its_trial_and_all_failures_fail_the_search(tuned_rows):
    space = {"learning_rate": [0.3, -1.0]}
    found = found_by(spec_of(tuned_rows, space=space, sampler="grid"))
    assert [each.state for each in found.ended] == ["complete", "failed"]
    assert "learning_rate" in str(found.ended[1].error) or "eta" in str(found.ended[1].error)

    with pytest.raises(InvalidArgumentError, match="learning_rate"):
        found_by(spec_of(tuned_rows, space={"learning_rate": [-2.0, -1.0]}, sampler="grid"))
    with pytest.raises(InvalidArgumentError, match="max_dept"):
        found_by(spec_of(tuned_rows, space={"max_dept": SPACE["max_depth"]}))
    # The first value is accepted, but never chosen.
    some = spec_of(tuned_rows, space={"learning_rate": [0.3, -2.0, -1.0]}, trials=1)
    with pytest.raises(TrainingError, match=r"all 1 trials failed; the first error is that of trial 0 with"):
        found_by(some.model_copy(update={"seed": next(seed for seed in range(99) if first_choice(some, seed) < 0)}))


def first_choice(spec: TuneJobSpec, seed: int) -> float:
    study = optuna.create_study(sampler=seeded(sampler_named(None), seed, 0))
    return spec.space["learning_rate"].suggest(study.ask(), "learning_rate")


def parabola(params: dict[str, float], context: Any, *, offset: float) -> float | dict[str, float] | None:
    x = params["x"] - offset
    if params["x"] > 8:
        raise ValueError(f"too large: {params['x']:.1f}")
    for step in range(3):
        context.report(x**2 + 2 - step, model={"x": params["x"], "pid": os.getpid()})
        if context.should_prune():
            raise TrialPruned
    return None if params["x"] < 5 else x**2


def function_spec(**changes: Any) -> TuneJobSpec:
    fields = {
        "program": "/x/_code/" + "0" * 64,
        "space": {"x": {"low": -10, "high": 10}},
        "trials": 10,
        "scaling_config": {"num_workers": 2, "num_cpu_per_worker": 1},
        **changes,
    }
    return TuneJobSpec.parse(fields)


@pytest.mark.parametrize("batches", [False, True])
def test_a_function_is_searched_by_two_workers(tmp_path, batches):
    function = pickled(functools.partial(parabola, offset=3.0), "function")
    spec = function_spec(batches=batches, pruner="none")

    runs = [found_by(spec, SearchCode(function), folder=str(tmp_path / str(number))) for number in range(1 + batches)]

    found = runs[0]
    assert found.num_workers == 2
    for each in found.ended:
        if each.params["x"] > 8:
            assert (each.state, each.value) == ("failed", None)
            assert str(each.error).startswith("ValueError: too large")
        else:
            assert each.value == pytest.approx((each.params["x"] - 3) ** 2)
            assert each.model is not None
    if batches:
        assert [each.params for each in found.ended] == [each.params for each in runs[1].ended]


def suggested(trial: Any) -> dict[str, Any]:
    kind = trial.suggest_categorical("kind", ["small", "large"])
    x = trial.suggest_float("x", 0, 1) if kind == "small" else trial.suggest_float("y", 100, 200)
    return {"x": x, "kind": kind}


def test_a_function_suggests_the_parameters():
    function = pickled(lambda params, context: params["x"], "function")
    spec = function_spec(space={}, direction="maximize", scaling_config={"num_workers": 1})

    found = found_by(spec, SearchCode(function, space=suggested))

    assert found.best.params["kind"] == "large"
    assert found.best.value == max(each.params["x"] for each in found.ended)
    with pytest.raises(TrainingError, match="must return a mapping"):
        found_by(spec, SearchCode(function, space=lambda trial: 5))


def test_the_metric_must_be_evaluated(tuned_rows):
    with pytest.raises(InvalidArgumentError, match="is not among the metrics of the estimator"):
        found_by(spec_of(tuned_rows, metric="mae", train={"params": {"eval_metric": ["rmse"]}}))
    found = found_by(spec_of(tuned_rows, metric="mae", trials=1))
    assert list(found.best.metrics) == ["mae"]


def dies(params: dict[str, float], context: Any, *, calls: str, times: int) -> float:
    """End the worker of trial 3 this often."""
    with Path(calls).open("a") as file:
        file.write(f"{context.number}\n")
    if context.number == 3 and Path(calls).read_text().split().count("3") <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return params["x"] ** 2


@pytest.mark.parametrize(("workers", "batches"), [(1, False), (2, False), (2, True)], ids=["one", "two", "batches"])
def test_a_trial_that_ends_its_worker_twice_fails_alone(tmp_path, workers, batches):
    calls = tmp_path / "calls"
    spec = function_spec(
        trials=6, sampler="random", batches=batches, scaling_config={"num_workers": workers, "num_cpu_per_worker": 1}
    )
    code = SearchCode(pickled(functools.partial(dies, calls=str(calls), times=9), "function"))

    found = found_by(spec, code)

    assert found.restarts == 0
    assert [each.state for each in found.ended] == ["complete"] * 3 + ["failed"] + ["complete"] * 2
    reason = "the worker of the trial was lost in 2 attempts: its process was killed by SIGKILL"
    assert str(found.ended[3].error).startswith(reason)
    assert sorted(calls.read_text().split()) == ["0", "1", "2", "3", "3", "4", "5"]


def test_a_lost_worker_repeats_its_trial_with_the_same_parameters(tmp_path):
    spec = function_spec(trials=6, scaling_config={"num_workers": 1})
    code = SearchCode(pickled(functools.partial(dies, calls=str(tmp_path / "calls"), times=1), "function"))
    storage = optuna.storages.InMemoryStorage()

    lost, undisturbed = found_by(spec, code, storage=storage), found_by(spec, code)

    assert (lost.restarts, undisturbed.restarts) == (0, 0)
    assert [(each.params, each.value) for each in lost.ended] == [
        (each.params, each.value) for each in undisturbed.ended
    ]
    states = [each.state.name for each in optuna.load_study(study_name=STUDY, storage=storage).trials]
    assert states == ["COMPLETE"] * 3 + ["FAIL"] + ["COMPLETE"] * 3


def hits(predictions: Any, data: Any) -> tuple[str, float, bool]:
    return "hits", float(((predictions > 0.5) == data.get_label()).mean()), True


def misses(predictions: Any, data: Any) -> list[tuple[str, float, bool]]:
    return [("misses", float(((predictions > 0.5) != data.get_label()).mean()), False)]


def accuracy(predictions: Any, matrix: Any) -> tuple[str, float]:
    return "accuracy", float(((predictions > 0.5) == matrix.get_label()).mean())


GRID: dict[str, Any] = {"space": {"max_depth": [1, 6], "learning_rate": [0.01, 0.5]}, "sampler": "grid"}


@pytest.fixture(scope="session")
def metric_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    for name, seed in (("train", 1), ("holdout", 2)):
        boosting_metrics.table(600, seed).to_parquet(folder / f"{name}.parquet")
    return folder


def metric_spec(rows: Path, case: MetricCase, **changes: Any) -> TuneJobSpec:
    label = boosting_metrics.BOUNDS if case.label == "low" else {"label_col": case.label}
    ranks = {"group_col": "query"} if case.group else {}
    train = {"params": case.all_params, "input_cols": boosting_metrics.COLUMNS, "label_col": None, **label, **ranks}
    return spec_of(rows, case.framework, train=train, **GRID, **changes)


QUICK = {"interval-regression-accuracy", "r2"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=() if each.metric in QUICK else pytest.mark.long, id=str(each)) for each in CASES],
)
def test_a_search_keeps_the_trial_whose_metric_is_best(metric_rows, case):
    """The values are those of the plain library, and the best is the one that a longer training approaches."""
    train, holdout = (pd.read_parquet(metric_rows / f"{name}.parquet") for name in ("train", "holdout"))
    learned = case.values(train, train, 15, learning_rate=0.3)
    best_of = max if learned[-1] > learned[0] else min

    found = found_by(metric_spec(metric_rows, case))

    values = [case.values(train, holdout, 12, **each.params)[-1] for each in found.ended]
    assert [each.value for each in found.ended] == pytest.approx(values, rel=1e-5)
    assert found.best.value == pytest.approx(best_of(values), rel=1e-5)
    assert found.metric == case.evaluated


@pytest.mark.parametrize(
    ("case", "metric", "direction", "best_of", "stopping"),
    [
        (MetricCase("lightgbm", "binary_logloss", {"objective": "binary"}, "binary"), hits, None, max, None),
        (MetricCase("lightgbm", "auc", {"objective": "binary"}, "binary"), misses, None, min, 2),
        (MetricCase("xgboost", "logloss", {"objective": "binary:logistic"}, "binary"), accuracy, "maximize", max, 2),
    ],
)
def test_a_metric_of_the_user_decides_in_its_direction(metric_rows, case, metric, direction, best_of, stopping):
    spec = metric_spec(metric_rows, case, direction=direction, early_stopping_rounds=stopping)

    found = engine.run(spec, SearchCode(), UserCode(metrics=(metric,)))

    name = found.best.metrics and [*found.best.metrics][-1]
    assert found.direction == ("maximize" if best_of is max else "minimize")
    assert found.best.value == best_of(each.metrics[name] for each in found.ended)
    assert len({each.value for each in found.ended}) > 2
    if stopping:  # the value of a trial is its best, and not that of the first round
        for trial in found.ended:
            request = with_params(spec.trial_request(), trial.params).model_copy(update={"early_stopping_rounds": None})
            values = train(request, user_code=UserCode(metrics=(metric,))).eval_results["holdout"][name]
            assert trial.value == best_of(values[: trial.rounds + 2])


def test_a_direction_that_contradicts_what_the_users_metric_tells_is_refused(metric_rows):
    case = MetricCase("lightgbm", "binary_logloss", {"objective": "binary"}, "binary")
    with pytest.raises(InvalidArgumentError, match='direction="minimize" contradicts the custom_metric hits'):
        engine.run(metric_spec(metric_rows, case, direction="minimize"), SearchCode(), UserCode(metrics=(hits,)))


def test_a_search_that_continues_keeps_the_direction_that_a_function_has_told(metric_rows):
    case = MetricCase("lightgbm", "binary_logloss", {"objective": "binary"}, "binary")
    storage = optuna.storages.InMemoryStorage()
    code = UserCode(metrics=(hits,))

    few = engine.run(metric_spec(metric_rows, case, trials=2), SearchCode(), code, storage=storage)
    all_ = engine.run(metric_spec(metric_rows, case), SearchCode(), code, storage=storage)

    assert (few.direction, all_.direction) == ("maximize", "maximize")
    assert [each.number for each in all_.ended] == [0, 1, 2, 3]


def test_a_search_over_spaces_of_objectives_is_refused_if_their_metrics_differ(metric_rows):
    spec = metric_spec(metric_rows, MetricCase("xgboost", "", {}, "binary"))
    mixed = spec.model_copy(update={"space": {"objective": Range(choices=["binary:logistic", "binary:hinge"])}})

    with pytest.raises(InvalidArgumentError, match=r'"logloss" with .* and "error" with'):
        found_by(mixed)
    assert found_by(mixed.model_copy(update={"metric": "error"})).metric == "error"
    drawn = SearchCode(space=lambda trial: {"objective": "binary:logistic", "max_depth": trial.suggest_int("d", 2, 3)})
    assert found_by(spec.model_copy(update={"space": {}, "sampler": None, "trials": 2}), drawn).metric == "logloss"


class Stop(BaseException):
    """No Exception, and without a text."""

    def __str__(self) -> str:
        raise RuntimeError


ENDS = (SystemExit("bad arguments"), SystemExit(0), SystemExit(), KeyboardInterrupt(), GeneratorExit(), Stop())


def ends(params: dict[str, float], context: Any) -> float:
    """Raise what ends a process, in a trial, and in a child that the last trial forks."""
    if context.number < len(ENDS):
        raise ENDS[context.number]
    child = os.fork()
    if child == 0:
        raise SystemExit(3)
    os.waitpid(child, 0)
    return params["x"]


def test_what_ends_a_process_fails_its_trial_only():
    found = found_by(
        function_spec(trials=len(ENDS) + 1, scaling_config={"num_workers": 1}),
        SearchCode(pickled(ends, "function")),
    )

    *failed, last = found.ended
    assert (found.restarts, last.state, last.value) == (0, "complete", last.params["x"])
    assert {(each.state, each.value) for each in failed} == {("failed", None)}
    assert str(failed[0].error).startswith("SystemExit: the trial called sys.exit('bad arguments'), so it has no value")
    assert "sys.exit(0)" in str(failed[1].error)
    assert [str(each.error).split(":")[0] for each in failed[3:5]] == ["KeyboardInterrupt", "GeneratorExit"]
    assert "Stop" in str(failed[5].error)


class LeavesDeepTrees(xgboost.callback.TrainingCallback):
    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if json.loads(model.save_config())["learner"]["gradient_booster"]["tree_train_param"]["max_depth"] == "6":
            raise SystemExit(1)
        return False


def leaves_deep_lightgbm(env: Any) -> None:
    if env.params["max_depth"] == 6:
        raise SystemExit(1)


@pytest.mark.parametrize(
    ("framework", "params", "code"),
    [
        ("xgboost", {"objective": "binary:logistic"}, UserCode(callbacks=(LeavesDeepTrees(),))),
        ("lightgbm", {"objective": "binary"}, UserCode(callbacks=(leaves_deep_lightgbm,))),
    ],
)
def test_a_function_of_an_estimator_that_exits_fails_its_trial_only(metric_rows, framework, params, code):
    spec = metric_spec(metric_rows, MetricCase(framework, "", params, "binary"))

    found = engine.run(spec, SearchCode(), code)

    states = [(each.params["max_depth"], each.state) for each in found.ended]
    assert set(states) == {(1, "complete"), (6, "failed")}
    assert all("sys.exit(1)" in str(each.error) for each in found.ended if each.state == "failed")
