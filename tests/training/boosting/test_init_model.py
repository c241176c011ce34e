"""A training that continues from a model trains the model of the plain library in one process, and refuses others."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

from shoal.boosting_libraries import Framework
from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError, WorkerLostError
from shoal.jobs import JobSpec
from shoal.jobs.remote_files import taken_along, unpacked
from shoal.training.boosting import engine
from shoal.training.boosting.library import library_of
from shoal.training.boosting.request import TrainRequest, TrainResult
from tests.support.predictions import predict_booster

FEATURES = ["a", "b", "c"]
PARAMS: dict[str, dict[str, Any]] = {
    "xgboost": {"objective": "binary:logistic", "eval_metric": "logloss", "max_depth": 3, "eta": 0.5},
    "lightgbm": {
        "objective": "binary",
        "metric": "binary_logloss",
        "num_leaves": 7,
        "learning_rate": 0.5,
        # Several workers of LightGBM estimate the number of rows in a leaf.
        "min_data_in_leaf": 1,
        "min_data_per_group": 10,
        "verbosity": -1,
    },
}
NAMES = {"xgboost": ("eval", "logloss"), "lightgbm": ("eval", "binary_logloss")}
ROUNDS, INIT_ROUNDS = 30, 4

each_library = pytest.mark.parametrize("framework", PARAMS)
pytestmark = pytest.mark.usefixtures("without_ray")


def rows(seed: int, count: int = 1200) -> pd.DataFrame:
    """Whole numbers, of which the bins are the same in one process and in several."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({name: rng.integers(0, 30 + seed, count).astype(float) for name in FEATURES})
    chance = 1 / (1 + np.exp(-(frame.a / 10 - frame.b / 15 + frame.c * frame.a / 600 - 1)))
    return frame.assign(y=(rng.random(count) < chance).astype(float))


def with_categories(frame: pd.DataFrame, values: str) -> pd.DataFrame:
    return frame.assign(c=pd.Series([values[int(number) % len(values)] for number in frame.c], dtype="str"))


def plain(framework: str, frame: pd.DataFrame, rounds: int, **options: Any) -> Any:
    """Train with the library alone; options: a model to continue from, rows that stop it early, columns of codes."""
    base, held_out = options.get("base"), options.get("held_out")
    categorical = options.get("categorical", [])
    if framework == "xgboost":
        kinds = ["c" if name in categorical else "q" for name in FEATURES]
        settings = {"enable_categorical": True, "feature_types": kinds, "feature_names": FEATURES}
        matrix = xgboost.QuantileDMatrix(frame[FEATURES].to_numpy(np.float32), frame.y, **settings)
        evals = []
        if held_out is not None:
            array = held_out[FEATURES].to_numpy(np.float32)
            evals = [(xgboost.QuantileDMatrix(array, held_out.y, ref=matrix, **settings), "eval")]
        return xgboost.train(
            PARAMS[framework],
            matrix,
            rounds,
            xgb_model=base,
            evals=evals,
            early_stopping_rounds=3 if evals else None,
            verbose_eval=False,
        )
    names = {"feature_name": FEATURES, "categorical_feature": categorical}
    data = lightgbm.Dataset(frame[FEATURES].to_numpy(float), frame.y, params={"verbosity": -1}, **names)
    evals = [] if held_out is None else [data.create_valid(held_out[FEATURES].to_numpy(float), held_out.y)]
    callbacks = [lightgbm.early_stopping(3, verbose=False)] if evals else []
    return lightgbm.train(
        {**PARAMS[framework], "feature_pre_filter": False},
        data,
        rounds,
        init_model=base,
        valid_sets=evals,
        valid_names=["eval"] if evals else None,
        callbacks=callbacks,
    )


def content(framework: str, booster: Any) -> bytes:
    return library_of(framework).serialised(booster)


def scores(framework: str, booster: Any, frame: pd.DataFrame) -> np.ndarray:
    array = frame[FEATURES].to_numpy(float)
    if framework == "xgboost":
        return np.asarray(booster.inplace_predict(array.astype(np.float32), predict_type="margin"))
    return np.asarray(booster.predict(array, raw_score=True, num_iteration=-1))


class Continued:
    """Trains with shoal, from a model, on files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dataset(self, name: str, frame: pd.DataFrame) -> dict[str, Any]:
        path = self.folder / f"{name}.parquet"
        frame.to_parquet(path, row_group_size=300)
        return {"paths": (str(path),)}

    def request(self, framework: str, frame: pd.DataFrame, **changes: Any) -> TrainRequest:
        values = {
            "framework": framework,
            "dataset": self.dataset("rows", frame),
            "input_cols": FEATURES,
            "label_col": "y",
            "n_estimators": ROUNDS,
            "params": PARAMS[framework],
            "init_model": "/given.model",
            "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1},
        }
        return TrainRequest(**{**values, **changes})

    def train(self, framework: str, frame: pd.DataFrame, model: bytes, workers: int = 1, **changes: Any) -> TrainResult:
        size = {"num_workers": workers, "num_cpu_per_worker": 1}
        asked = self.request(framework, frame, scaling_config=size, **changes)
        return engine.train(asked, init_model=model)


@pytest.fixture
def continued(tmp_path: Path) -> Continued:
    return Continued(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
@each_library
def test_the_model_is_that_of_the_plain_library_and_stops_in_the_same_round(
    continued: Continued, framework: str, workers: int
) -> None:
    base, frame, held_out = plain(framework, rows(0), INIT_ROUNDS), rows(1), rows(2, 300)
    right = plain(framework, frame, ROUNDS, base=base, held_out=held_out)
    evals = {"eval": continued.dataset("held-out", held_out)}
    found = continued.train(
        framework, frame, content(framework, base), workers, eval_set=evals, early_stopping_rounds=3
    )

    booster = found.booster()
    assert booster.best_iteration == right.best_iteration
    assert INIT_ROUNDS < found.rounds < INIT_ROUNDS + ROUNDS
    assert found.init_rounds == INIT_ROUNDS
    name, metric = NAMES[framework]
    values = found.eval_results[name][metric]
    assert len(values) == found.rounds - INIT_ROUNDS
    assert values[found.final_round] == min(values) == found.best_score
    best = right.best_score if framework == "xgboost" else right.best_score[name][metric]
    assert found.best_score == pytest.approx(best, rel=1e-5)
    np.testing.assert_allclose(scores(framework, booster, frame), scores(framework, right, frame), atol=1e-4)


@each_library
def test_the_categories_of_the_model_are_used(
    continued: Continued, framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = with_categories(rows(0), "bcd"), with_categories(rows(1), "abd")
    started = {"init_model": None, "n_estimators": INIT_ROUNDS, "categorical_cols": ["c"]}
    first = engine.train(continued.request(framework, old, **started))
    found = continued.train(framework, new, first.model, 2, categorical_cols=["c"], n_estimators=5)

    # "a" is unknown to the model, so the value is missing.
    codes = {"a": None, "b": 0, "c": 1, "d": 2}
    assert "1 categories that init_model does not know, which count as missing values: a" in capsys.readouterr().out
    encoded = new.assign(c=pd.array(new.c.map(codes), dtype="float32"))
    assert encoded.c.isna().sum() == (new.c == "a").sum() > 100
    right = plain(framework, encoded, 5, base=first.booster(), categorical=["c"])
    np.testing.assert_allclose(
        scores(framework, found.booster(), encoded), scores(framework, right, encoded), atol=1e-4
    )
    categories = importlib.import_module(f"shoal.training.{framework}.library").categories_of(found.booster())
    assert {name: values.to_pylist() for name, values in categories.items()} == {"c": ["b", "c", "d"]}


@each_library
def test_a_training_continues_from_its_checkpoints_to_the_same_bytes(
    continued: Continued, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, frame, held_out = plain(framework, rows(0), INIT_ROUNDS), rows(1), rows(2, 300)
    asked = {
        "n_estimators": 8,
        "run_config": {"checkpoint_every": 3, "max_restarts": 1},
        "eval_set": {"eval": continued.dataset("held-out", held_out)},
        "early_stopping_rounds": 8,
    }
    right = continued.train(framework, frame, content(framework, base), **asked)
    report, lost = engine.Training._report, []

    def lose_workers(self: Any, display: Any, first: int, done: int, history: Any) -> None:
        report(self, display, first, done, history)
        if self._checkpoint.rounds == 3 and not lost:
            lost.append(done)
            raise WorkerLostError("lost")

    monkeypatch.setattr(engine.Training, "_report", lose_workers)
    found = continued.train(framework, frame, content(framework, base), **asked)
    assert (found.restarts, lost) == (1, [3])
    assert (found.model, found.eval_results) == (right.model, right.eval_results)
    assert (found.best_iteration, found.best_score) == (right.best_iteration, right.best_score)
    assert found.rounds == INIT_ROUNDS + 8


def test_categories_that_xgboost_itself_has_stored_are_used(continued: Continued) -> None:
    old, new = with_categories(rows(0), "dbc"), with_categories(rows(1), "dbc")
    frame = old[FEATURES].assign(c=pd.Categorical(old.c, categories=["d", "b", "c"]))
    base = xgboost.train(PARAMS["xgboost"], xgboost.QuantileDMatrix(frame, old.y, enable_categorical=True), INIT_ROUNDS)
    found = continued.train("xgboost", new, content("xgboost", base), categorical_cols=["c"])
    again = new[FEATURES].assign(c=pd.Categorical(new.c, categories=["d", "b", "c"]))
    matrix = xgboost.QuantileDMatrix(again, new.y, enable_categorical=True)
    right = xgboost.train(PARAMS["xgboost"], matrix, ROUNDS, xgb_model=base)
    encoded = new.assign(c=new.c.map({"d": 0, "b": 1, "c": 2}).astype(float))
    mine = found.booster()
    predicted = mine.inplace_predict(encoded[FEATURES].to_numpy(np.float32))
    np.testing.assert_allclose(predicted, right.predict(matrix), atol=1e-5)


XGBOOST = tuple(map(int, xgboost.__version__.split(".")[:2]))

OTHER_PARAMS = [
    ("xgboost", {"objective": "reg:squarederror"}, "objective .*: binary:logistic and reg:squarederror"),
    pytest.param(
        *("xgboost", {**PARAMS["xgboost"], "booster": "dart"}, "booster .*: gbtree and dart"),
        marks=pytest.mark.skipif(XGBOOST >= (3, 4), reason="dart is gbtree there"),
    ),
    ("xgboost", {"objective": "multi:softprob", "num_class": 3}, "objective .*: binary:logistic and multi:softprob"),
    ("lightgbm", {"objective": "regression"}, "objective .*: binary sigmoid:1 and regression"),
    ("lightgbm", {"objective": "binary", "sigmoid": 2}, "objective .*: binary sigmoid:1 and binary sigmoid:2"),
    ("lightgbm", {"objective": "multiclass", "num_class": 3}, "objective .*: binary sigmoid:1 and multiclass"),
    (
        "lightgbm",
        {**PARAMS["lightgbm"], "boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1},
        "random forest.* cannot continue",
    ),
]


@pytest.mark.parametrize(("framework", "params", "message"), OTHER_PARAMS)
def test_parameters_of_another_model_are_refused_before_a_worker_starts(
    continued: Continued, framework: str, params: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "shared_gang", None)
    base = content(framework, plain(framework, rows(0), 1))
    with pytest.raises(InvalidArgumentError, match=message):
        continued.train(framework, rows(1), base, params=params)


@each_library
def test_another_model_is_refused_before_anything_starts(
    continued: Continued, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = with_categories(rows(1), "bcd")
    source = DataConnector.from_spec(continued.request(framework, frame).dataset).source
    numbers = library_of(framework).init_model(content(framework, plain(framework, rows(0), 1)))
    texts = {"categorical_cols": ["c"], "n_estimators": 1, "init_model": None}
    categorical = library_of(framework).init_model(engine.train(continued.request(framework, frame, **texts)).model)
    other = "lightgbm" if framework == "xgboost" else "xgboost"
    for model, changes, error, message in (
        (numbers, {"input_cols": ["b", "a", "c"]}, InvalidArgumentError, "the model has a, b, c, and .* are b, a, c"),
        (numbers, {"input_cols": ["a", "b"]}, InvalidArgumentError, "the model has a, b, c, and .* are a, b"),
        (numbers, {"categorical_cols": ["c"]}, InvalidArgumentError, "the model has none, and .* are c"),
        (categorical, {}, InvalidArgumentError, "the model has c, and categorical_cols are none"),
        (categorical, {"categorical_cols": ["c"]}, None, ""),
    ):
        asked = continued.request(framework, frame, **changes)
        if error is None:
            model.check(asked, source)
            continue
        with pytest.raises(error, match=message):
            model.check(asked, source)
    whole = continued.request(framework, rows(1).astype({"c": int}), categorical_cols=["c"])
    with pytest.raises(DataError, match='column "c" is of type int64, but its categories are of type'):
        categorical.check(whole, DataConnector.from_spec(whole.dataset).source)
    with pytest.raises(InvalidArgumentError, match="cannot load init_model"):
        library_of(framework).init_model(content(other, plain(other, rows(0), 1)))


@pytest.mark.parametrize(
    ("framework", "content", "message"),
    [
        # XGBoost's own error about a file that is not UTF-8 is a UnicodeDecodeError.
        ("xgboost", b"binf" + bytes(range(128, 228)), r"its old binary format.* load it with XGBoost 3\.0 or older"),
        ("xgboost", b"{\xff" + bytes(range(128, 228)), "Use a model that XGBoost has written"),
        ("xgboost", b"", "the file is empty"),
        ("xgboost", b"\x80\x05\x95", "the file contains a pickled object: load it"),
        ("xgboost", b"tree\nversion=v4\n", "the file contains a model of lightgbm"),
        ("lightgbm", b"", "the file is empty"),
        ("lightgbm", b'{"learner": {}}', "the file contains a model of xgboost"),
        ("lightgbm", b"\x80\x05\x95", "the file contains a pickled object: load it"),
        ("lightgbm", b"hello", "the file is no model in LightGBM's text format"),
    ],
)
def test_a_file_that_is_no_model_of_the_library_is_named(framework: Framework, content: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"cannot load init_model: .*{message}"):
        library_of(framework).init_model(content)


def test_a_model_of_lightgbm_that_was_cut_off_or_changed_is_refused() -> None:
    whole = content("lightgbm", plain("lightgbm", rows(0), 3))
    for damaged, message in (
        (whole[: len(whole) // 3], "the file is cut off"),
        (whole[: whole.index(b"end of parameters")], "the file is cut off"),
        (whole.replace(b"\n", b"\r\n"), "ends of lines were changed"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):  # LightGBM would end the process
            library_of("lightgbm").init_model(damaged)


def test_models_without_known_codes_are_refused(continued: Continued) -> None:
    base = plain("xgboost", rows(0), 1, categorical=["c"])
    asked = continued.request("xgboost", with_categories(rows(1), "bcd"), categorical_cols=["c"])
    with pytest.raises(InvalidArgumentError, match="does not contain the categories of its categorical columns c"):
        library_of("xgboost").init_model(content("xgboost", base)).check(
            asked, DataConnector.from_spec(asked.dataset).source
        )


def test_the_value_that_counts_as_missing_is_that_of_the_model(continued: Continued) -> None:
    base, frame = plain("xgboost", rows(0), INIT_ROUNDS), rows(1)
    settings = {"missing": 3.0, "feature_names": FEATURES}
    array = frame[FEATURES].to_numpy(np.float32)
    matrix = xgboost.QuantileDMatrix(array, frame.y, **settings)
    right = xgboost.train(PARAMS["xgboost"], matrix, 5, xgb_model=base, verbose_eval=False)
    found = continued.train("xgboost", frame, content("xgboost", base), n_estimators=5, missing=3.0)
    predicted = predict_booster(
        found.booster(), DataConnector.from_parquet(continued.folder / "rows.parquet"), FEATURES
    )
    np.testing.assert_allclose(predicted, right.predict(xgboost.DMatrix(array, **settings)), atol=1e-6)

    asked = continued.request("xgboost", frame)
    with pytest.raises(InvalidArgumentError, match=r"trained with missing=3, and .* missing=None: set missing=3"):
        library_of("xgboost").init_model(found.model).check(asked, DataConnector.from_spec(asked.dataset).source)


def test_a_stored_model_travels_with_the_job_and_is_compared_by_its_content(continued: Continued) -> None:
    stored = f"/somewhere/_code/{'a' * 64}"
    asked = continued.request("xgboost", rows(1), init_model=stored)
    spec = JobSpec(**dict(asked))
    assert spec.comparable(lambda dataset: dataset).init_model == "a" * 64
    document, files = taken_along(spec.document(), {})
    assert files == {f"/_code/{'a' * 64}": stored}
    assert JobSpec.parse(document).init_model == document["init_model"] != stored
    assert unpacked(document, "/unpacked")["init_model"] == f"/unpacked/_code/{'a' * 64}"

    with pytest.raises(InvalidArgumentError, match='"models:/delays" names no version'):
        continued.request("xgboost", rows(1), init_model="models:/delays")
    with pytest.raises(InvalidArgumentError, match="is loaded from MLflow"):
        JobSpec(**{**dict(asked), "init_model": "models:/delays@champion", "tracking": None})
