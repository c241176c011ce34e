"""`shoal.many.train` and `predict`: the models and predictions of the plain libraries, one per partition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

from shoal import RunConfig, many
from shoal.data import DataConnector
from shoal.distributors.lightgbm import LightGBMEstimator
from shoal.distributors.xgboost import XGBEstimator
from shoal.errors import DataError, InvalidArgumentError
from tests.support.without_ray import nodes_without_ray

pytestmark = pytest.mark.processes

COLUMNS = ["a", "b", "c"]
ONE = many.PartitionsScalingConfig(num_workers=1)


@pytest.fixture(autouse=True)
def nodes(fresh_home: Path) -> Iterator[None]:
    """This process is a driver with two CPUs."""
    with nodes_without_ray(2):
        yield


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(3_000, 3)), columns=COLUMNS)
    frame["store"] = random.integers(0, 12, 3_000)
    frame["y"] = frame["a"] * frame["store"] + frame["b"] + random.normal(size=3_000) / 10
    frame["w"] = random.random(3_000)
    return frame


@pytest.fixture(scope="module")
def rows(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> DataConnector:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    frame.to_parquet(path, row_group_size=700)
    return DataConnector.from_parquet(path)


def plain_xgboost(rows: pd.DataFrame) -> xgboost.Booster:
    params = {"objective": "reg:squarederror", "max_depth": 3, "subsample": 0.7, "seed": 5, "nthread": 1}
    return xgboost.train(params, xgboost.DMatrix(rows[COLUMNS], rows["y"], weight=rows["w"]), 7)


def plain_lightgbm(rows: pd.DataFrame) -> lightgbm.Booster:
    # The same settings as those of `LightGBMEstimator.fit`, with which a training is reproducible.
    given = {"objective": "regression", "num_leaves": 7, "bagging_fraction": 0.7, "bagging_freq": 1, "seed": 5}
    fixed = {
        "deterministic": True,
        "force_col_wise": True,
        "feature_pre_filter": False,
        "num_threads": 1,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(rows[COLUMNS], rows["y"], weight=rows["w"])
    return lightgbm.train({**given, **fixed, "num_iterations": 7}, data, 7)


def xgboost_estimator() -> XGBEstimator:
    return XGBEstimator(7, "reg:squarederror", {"max_depth": 3, "subsample": 0.7}, run_config=RunConfig(seed=5))


def lightgbm_estimator() -> LightGBMEstimator:
    params = {"num_leaves": 7, "bagging_fraction": 0.7, "bagging_freq": 1}
    return LightGBMEstimator(7, "regression", params, run_config=RunConfig(seed=5))


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_each_model_is_that_of_the_plain_library_byte_for_byte(
    library: str, rows: DataConnector, frame: pd.DataFrame, tmp_path: Path
) -> None:
    estimator: Any = xgboost_estimator() if library == "xgboost" else lightgbm_estimator()
    models = many.train(estimator, rows, "store", input_cols=COLUMNS, label_col="y", weight_col="w", scaling_config=ONE)

    assert models.keys == list(range(12))
    expected = {}
    for key, part in frame.groupby("store"):
        if library == "xgboost":
            expected[key] = plain_xgboost(part)
            assert models[key].content() == bytes(expected[key].save_raw("ubj"))
        else:
            expected[key] = plain_lightgbm(part)
            assert models[key].content().decode() == expected[key].model_to_string()

    predicted = many.predict(
        models, rows, "store", keep_cols=["store", *COLUMNS], output_path=tmp_path / "out", scaling_config=ONE
    )
    written = pd.read_parquet(tmp_path / "out")
    assert len(written) == len(frame)
    pd.testing.assert_frame_equal(written, pd.concat(predicted.rows(), ignore_index=True))
    for key, part in written.groupby("store"):
        source = frame[frame["store"] == key][COLUMNS].reset_index(drop=True)
        pd.testing.assert_frame_equal(part[COLUMNS].reset_index(drop=True), source)
        features: Any = xgboost.DMatrix(source) if library == "xgboost" else source
        np.testing.assert_array_equal(part["prediction"], expected[key].predict(features))
    with pytest.raises(InvalidArgumentError, match="is not empty"):
        predicted.write_parquet(tmp_path / "out")


def test_models_of_a_function_predict_and_a_key_without_a_model_is_refused_or_null(
    rows: DataConnector, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    from sklearn.linear_model import LinearRegression

    def train(rows: pd.DataFrame, key: int) -> Any:
        if key == 2:
            raise ValueError("too few rows")
        if key == 3:
            return None
        booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(rows[COLUMNS], rows["y"]), 2)
        return booster if key == 4 else LinearRegression().fit(rows[COLUMNS], rows["y"])

    models = many.train(train, frame[frame["store"] < 5], "store", scaling_config=ONE)
    assert [models[key].kind for key in (0, 4)] == ["pickle", "xgboost"]
    assert {each.key: each.error for each in models.failed} == {
        2: "ValueError: too few rows",
        3: "shoal.errors.InvalidArgumentError: the function returned None: return the model",
    }

    new = frame[frame["store"] < 6]
    with pytest.raises(DataError, match=r'3 keys of the dataset have no model.* or set missing="null"'):
        many.predict(models, new, "store", scaling_config=ONE)
    # One null makes floats of the keys, which select the same models.
    new = pd.concat([new, new.head(1).assign(store=np.nan)], ignore_index=True)
    capsys.readouterr()
    found = pd.concat(many.predict(models, new, "store", missing="null", scaling_config=ONE).rows())
    nulls = found.groupby("store", dropna=False)["prediction"].apply(lambda values: values.isna().all())
    assert [str(key) for key in nulls.index if nulls[key]] == ["2.0", "3.0", "5.0", "nan"]
    lost = new.loc[new["store"].isin([2, 3, 5]), "store"].value_counts().sort_index()
    keys = ", ".join(f"{key:.1f} ({rows} rows)" for key, rows in lost.items())
    said = f"{lost.sum() + 1} of {len(new):,} rows have null predictions, because these keys have no model: {keys}, "
    said += "None (1 row)"
    assert said in capsys.readouterr().out
    part = found[found["store"] == 1]
    np.testing.assert_array_equal(part["prediction"], models[1].value.predict(part[COLUMNS]))
    for key, error, said in (
        ("text", DataError, r"of type string \(text\), but those of the models are of type int64 \(number\)"),
        (40, DataError, "none of the 3 rows has a key with a model; their keys are 40"),
    ):
        with pytest.raises(error, match=said.replace("string", "(large_)?string")):
            many.predict(models, new.head(3).assign(store=key), "store", missing="null", scaling_config=ONE)
    with pytest.raises(InvalidArgumentError, match='a column "y", and prediction_col has the same name'):
        many.predict(models, new, "store", prediction_col="y")


def test_an_objective_of_the_user_is_used(rows: DataConnector, frame: pd.DataFrame) -> None:
    def squared(predicted: np.ndarray, matrix: xgboost.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        return predicted - matrix.get_label(), np.ones_like(predicted)

    models = many.train(XGBEstimator(3, squared), rows, "store", input_cols=COLUMNS, label_col="y", scaling_config=ONE)

    part = frame[frame["store"] == 1]
    plain = xgboost.train({"seed": 0, "nthread": 1}, xgboost.DMatrix(part[COLUMNS], part["y"]), 3, obj=squared)
    np.testing.assert_array_equal(
        models[1].value.predict(xgboost.DMatrix(part[COLUMNS])), plain.predict(xgboost.DMatrix(part[COLUMNS]))
    )


def test_wrong_arguments_are_refused_before_a_worker_starts(rows: DataConnector) -> None:
    good = {
        "fn_or_estimator": xgboost_estimator(),
        "data": rows,
        "by": "store",
        "input_cols": COLUMNS,
        "label_col": "y",
    }
    for arguments, error, said in (
        ({"label_col": "z"}, DataError, '"z"'),
        ({"label_col": None}, InvalidArgumentError, "label_col"),
        ({"label_col": "a"}, InvalidArgumentError, 'the label "a" is also in input_cols'),
        ({"label_col": "store"}, InvalidArgumentError, 'by names the label column "store"'),
        ({"columns": ["a"]}, InvalidArgumentError, "columns can be given only with a function"),
        ({"fn_or_estimator": print}, InvalidArgumentError, "input_cols, label_col can be given only with an estimator"),
        ({"fn_or_estimator": XGBEstimator(3, params={"max_deep": 3})}, InvalidArgumentError, "max_deep"),
    ):
        with pytest.raises(error, match=said):
            many.train(**{**good, **arguments})
    with pytest.raises(InvalidArgumentError, match="missing='zero' is not legal"):
        many.predict("job", rows, "store", missing="zero")  # type: ignore[arg-type]
