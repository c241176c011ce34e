"""Models that other programs have logged to MLflow predict what their own library predicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightgbm as lgb
import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xgboost as xgb
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from shoal.data import DataConnector
from shoal.errors import DataError, JobError
from shoal.jobs import Register
from shoal.models import loading
from shoal.models.holdout import Holdout, evaluate, try_out
from shoal.models.metrics import metric_value

ROWS = 300
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {"a": RNG.random(ROWS), "zip": RNG.choice([10, 20, 30, 70], ROWS), "t": RNG.choice(["b", "c"], ROWS)}
)
VALUE = FRAME["zip"].map({10: 1.0, 20: 5.0, 30: 2.0, 70: 9.0}) + FRAME["a"]
THREE = np.digitize(VALUE, [2.5, 6])
CATEGORIES = pd.CategoricalDtype([70, 20, 10, 30])  # not in ascending order
NUMBERS, MIXED = FRAME[["a", "zip"]], FRAME.astype({"zip": CATEGORIES, "t": "category"})


def saved(folder: Path, model: Any, **options: Any) -> str:
    flavour = {"xgboost": mlflow.xgboost, "lightgbm": mlflow.lightgbm}.get(type(model).__module__.partition(".")[0])
    if type(model) is lgb.LGBMModel:
        options["skops_trusted_types"] = ["lightgbm.sklearn.LGBMModel"]
    if type(model) is Pipeline:
        options["serialization_format"] = "cloudpickle"
    (flavour or mlflow.sklearn).save_model(model, folder / "model", pip_requirements=[], **options)
    return str(folder / "model")


def predicted(folder: Path, uri: str, frame: pd.DataFrame, **options: Any) -> np.ndarray:
    frame.to_parquet(folder / "rows.parquet")
    rows = DataConnector.from_parquet(folder / "rows.parquet")
    model = loading.load(uri, **options)
    model.check(rows.source)
    return model.predict_table(rows.to_arrow())


def booster(frame: pd.DataFrame | np.ndarray, **options: Any) -> xgb.Booster:
    data = xgb.DMatrix(frame, VALUE, enable_categorical=True, **options)
    return xgb.train({"max_depth": 3, "eta": 0.5, "max_cat_to_onehot": 1, "nthread": 1}, data, 10)


def light(frame: pd.DataFrame, **options: Any) -> lgb.Booster:
    params = {"verbosity": -1, "num_threads": 1, "min_data_per_group": 5}
    return lgb.train(params, lgb.Dataset(frame, VALUE, **options), 10)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_categories_of_the_library_encode_values_and_an_unknown_value_is_missing(tmp_path: Path, library: str) -> None:
    model = booster(MIXED) if library == "xgboost" else light(MIXED)
    uri = saved(tmp_path, model)
    rows = FRAME.assign(zip=np.where(FRAME.index < 5, 99, FRAME["zip"]))
    plain = rows.astype({"zip": CATEGORIES, "t": "category"})
    expected = model.predict(xgb.DMatrix(plain, enable_categorical=True) if library == "xgboost" else plain)

    np.testing.assert_allclose(predicted(tmp_path, uri, rows), expected, rtol=1e-5)
    np.testing.assert_allclose(predicted(tmp_path, uri, rows.astype({"t": "category"})), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (xgb.XGBClassifier(n_estimators=5, n_jobs=1), THREE > 0),
        (xgb.XGBClassifier(n_estimators=5, n_jobs=1, objective="multi:softmax"), THREE),
        (xgb.XGBRFRegressor(n_estimators=5, n_jobs=1), VALUE),
        (xgb.XGBModel(n_estimators=5, n_jobs=1), VALUE),
        (lgb.LGBMClassifier(n_estimators=5, n_jobs=1, verbosity=-1), np.array(["no", "yes"])[(THREE > 0).astype(int)]),
        (lgb.LGBMModel(n_estimators=5, n_jobs=1, verbosity=-1, objective="regression"), VALUE),
        (make_pipeline(LogisticRegression()), THREE),
        (xgb.XGBRegressor(n_estimators=5, n_jobs=1, booster="gblinear"), VALUE),
        (xgb.XGBClassifier(n_estimators=5, n_jobs=1, booster="gblinear"), THREE),
        (xgb.XGBRegressor(n_estimators=5, n_jobs=1, booster="dart"), VALUE),
        (make_pipeline(xgb.XGBRegressor(n_estimators=5, n_jobs=1, booster="gblinear")), VALUE),
        (make_pipeline(StandardScaler(), xgb.XGBClassifier(n_estimators=5, n_jobs=1, booster="gblinear")), THREE > 0),
    ],
    ids=[
        "xgb-binary", "xgb-softmax", "xgb-forest", "xgb-model", "lgb-text", "lgb-model", "pipeline",
        "xgb-linear", "xgb-linear-classifier", "xgb-dart", "pipeline-linear", "pipeline-linear-classifier",
    ],
)  # fmt: skip
def test_estimators_predict_as_they_do_themselves(tmp_path: Path, model: Any, label: Any) -> None:
    model.fit(NUMBERS, label)
    is_classifier = hasattr(model, "predict_proba")
    expected = model.predict_proba(NUMBERS) if is_classifier else model.predict(NUMBERS)
    expected = expected[:, 1] if is_classifier and expected.shape[1] == 2 else expected
    got = predicted(tmp_path, saved(tmp_path, model), FRAME)

    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("named", [True, False], ids=["names", "no names"])
@pytest.mark.parametrize("margin", [False, True], ids=["", "margin"])
@pytest.mark.parametrize("kind", ["gbtree", "dart", "gblinear"])
def test_boosters_of_every_kind_predict_as_they_do_themselves(kind: str, margin: bool, named: bool) -> None:
    rows = FRAME.assign(a=FRAME["a"].where(FRAME.index > 9))  # some are null
    features = rows[["a", "zip"]] if named else rows[["a", "zip"]].to_numpy()
    params = {"booster": kind, "rate_drop": 0.3, "nthread": 1, "verbosity": 0}
    model = xgb.train(params, xgb.DMatrix(features, VALUE), 10)
    model.set_attr(best_iteration="4")
    rounds = (0, 0) if kind == "gblinear" else (0, 5)
    expected = model.predict(
        xgb.DMatrix(features, base_margin=FRAME["zip"] if margin else None), iteration_range=rounds
    )

    found = loading.predictor_of(model, ["a", "zip"], base_margin_cols=["m"] if margin else [])
    got = found.predict_table(pa.Table.from_pandas(rows.assign(m=rows["zip"].astype(float))))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_booster_of_dart_encodes_categories(tmp_path: Path) -> None:
    data = xgb.DMatrix(MIXED, VALUE, enable_categorical=True)
    model = xgb.train({"booster": "dart", "rate_drop": 0.3, "nthread": 1}, data, 10)
    got = predicted(tmp_path, saved(tmp_path, model), FRAME)
    np.testing.assert_allclose(got, model.predict(data), rtol=1e-5)


def test_a_file_in_the_old_binary_format_is_named(tmp_path: Path) -> None:
    uri = saved(tmp_path, booster(NUMBERS))
    [file] = (tmp_path / "model").glob("model.*")
    file.write_bytes(b"binf\x00\x00\x80\x3f" + bytes(range(128, 228)))
    with pytest.raises(JobError, match=r"cannot be loaded: .* load it with XGBoost 3\.0 or older, and write it with"):
        loading.load(uri)


def test_a_ranker_and_an_early_stopped_estimator(tmp_path: Path) -> None:
    ranker = xgb.XGBRanker(n_estimators=5, n_jobs=1).fit(NUMBERS, THREE, qid=np.arange(ROWS) // 10)
    stopped = xgb.XGBRegressor(n_estimators=60, learning_rate=1, early_stopping_rounds=2, n_jobs=1)
    stopped.fit(NUMBERS[:100], VALUE[:100], eval_set=[(NUMBERS[100:], VALUE[100:] + RNG.normal(size=200))], verbose=0)
    assert stopped.best_iteration + 1 < stopped.get_booster().num_boosted_rounds()
    for name, model in (("ranker", ranker), ("stopped", stopped)):
        (folder := tmp_path / name).mkdir()
        np.testing.assert_allclose(predicted(folder, saved(folder, model), FRAME), model.predict(NUMBERS), rtol=1e-5)


def test_codes_without_categories_are_accepted_only_if_that_is_said(tmp_path: Path) -> None:
    codes = MIXED[["a"]].assign(zip=MIXED["zip"].cat.codes)
    model = booster(codes.astype(float), feature_types=["q", "c"])
    uri = saved(tmp_path, model)
    with pytest.raises(DataError, match=r"does not contain their categories: zip\. .* set category_codes=true"):
        predicted(tmp_path, uri, codes)
    expected = model.predict(xgb.DMatrix(codes.astype(float), feature_types=["q", "c"], enable_categorical=True))
    np.testing.assert_allclose(predicted(tmp_path, uri, codes, category_codes=True), expected, rtol=1e-5)
    with pytest.raises(DataError, match='column "zip" is of type double, but the model was trained on integer codes'):
        predicted(tmp_path, uri, codes.astype(float), category_codes=True)


def test_codes_of_a_model_that_shoal_trained_need_no_option(tmp_path: Path) -> None:
    codes = MIXED[["a"]].assign(zip=MIXED["zip"].cat.codes)
    model = light(codes, categorical_feature=["zip"])
    got = predicted(tmp_path, saved(tmp_path, model, metadata={"shoal": {}}), codes)
    np.testing.assert_allclose(got, model.predict(codes), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: booster(FRAME[["a"]].assign(t=pd.Categorical(np.where(FRAME["a"] > 0.5, "öö", "x")))), "not ASCII"),
        (lambda: booster(NUMBERS.to_numpy()), "2 columns without names, but input_cols names 0"),
        (
            lambda: light(FRAME[["a"]].assign(t=pd.Categorical(FRAME["t"], ordered=True), z=MIXED["zip"])),
            "2 lists of categories and 1 categorical columns that do not belong together",
        ),
    ],
    ids=["not ASCII", "no names", "ordered"],
)
def test_a_model_that_cannot_be_read_exactly_is_refused(tmp_path: Path, model: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        loading.load(saved(tmp_path, model()))


def test_input_cols_name_the_columns_of_a_model_without_names(tmp_path: Path) -> None:
    model = booster(NUMBERS.to_numpy())
    got = predicted(tmp_path, saved(tmp_path, model), FRAME, input_cols=["a", "zip"])
    np.testing.assert_allclose(got, model.predict(xgb.DMatrix(NUMBERS.to_numpy())), rtol=1e-5)


def test_classes_of_a_classifier_are_matched_with_the_labels(tmp_path: Path) -> None:
    label = THREE * 2  # classes 0, 2 and 4
    FRAME.assign(y=label).to_parquet(tmp_path / "holdout.parquet")
    register = Register(model="m", metric="logloss", holdout=DataConnector.from_parquet(tmp_path / "holdout.parquet"))
    holdout = Holdout.read(register, "y")
    model = lgb.LGBMClassifier(n_estimators=5, n_jobs=1, verbosity=-1).fit(NUMBERS, label)
    value = evaluate(loading.predictor_of(model), holdout, ["logloss"]).value
    assert value == pytest.approx(log_loss(label, model.predict_proba(NUMBERS)), rel=1e-5)

    texts = model.fit(NUMBERS, np.array(["low", "mid", "top"])[THREE])
    with pytest.raises(DataError, match="the model's classes are 'low', 'mid', 'top', but the holdout's labels are"):
        try_out(loading.predictor_of(texts), holdout.connector, "logloss")


def test_predicted_classes_are_compared_by_metrics_of_classes_only() -> None:
    labels, classes = np.array([0, 1, 2, 2]), np.array([0, 1, 2, 1])
    assert metric_value("accuracy", labels, classes, gives_classes=None) == 0.75
    assert metric_value("accuracy", labels, classes, gives_classes=True) == 0.75
    for metric in ("logloss", "auc"):
        with pytest.raises(DataError, match=f"{metric} needs probabilities, but the model predicts classes"):
            metric_value(metric, labels > 0, np.array([0, 1, 1, 0]), gives_classes=None)
    with pytest.raises(DataError, match="needs numbers as predictions, but the model predicts 'no'"):
        metric_value("accuracy", labels, np.array(["no", "yes", "no", "no"]), gives_classes=None)


def test_a_model_that_is_gone_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be loaded"):
        loading.load(str(tmp_path / "gone"))


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_margins_of_a_model_that_shoal_logged_are_added_as_the_library_adds_them(
    tmp_path: Path, library: str, classes: int
) -> None:
    names = [f"m{number}" for number in range(classes)]
    margin = RNG.normal(size=(ROWS, classes)).squeeze()
    label = VALUE if classes == 1 else THREE
    objective = {"objective": "poisson"} if classes == 1 else {"objective": "multiclass", "num_class": 3}
    if library == "xgboost":
        data = xgb.DMatrix(NUMBERS, label, base_margin=margin)
        objective["objective"] = "count:poisson" if classes == 1 else "multi:softprob"
        model = xgb.train({"nthread": 1, **objective}, data, 5)
        expected = model.predict(data)
    else:
        data = lgb.Dataset(NUMBERS, label, init_score=margin)
        model = lgb.train({"verbosity": -1, "num_threads": 1, **objective}, data, 5)
        score = model.predict(NUMBERS, raw_score=True) + margin  # LightGBM's predict takes no margins
        expected = np.exp(score) if classes == 1 else softmax(score, axis=1)
    uri = saved(tmp_path, model, metadata={"shoal": {"base_margin_cols": names}})
    rows = FRAME.assign(**dict(zip(names, margin.reshape(ROWS, -1).T, strict=True)), y=label)
    np.testing.assert_allclose(predicted(tmp_path, uri, rows), expected, rtol=1e-5)

    rows.to_parquet(tmp_path / "rows.parquet")
    metric = "rmse" if classes == 1 else "logloss"
    register = Register(model="m", metric=metric, holdout=DataConnector.from_parquet(tmp_path / "rows.parquet"))
    measured = evaluate(loading.load(uri), Holdout.read(register, "y"), [metric])
    right = np.sqrt(np.mean((expected - VALUE) ** 2)) if classes == 1 else log_loss(THREE, expected)
    assert measured.value == pytest.approx(right, rel=1e-5)

    with pytest.raises(DataError, match='row group 0: the base_margin "m0" is null in 1 of 300 rows'):
        predicted(tmp_path, uri, rows.assign(m0=rows["m0"].where(rows.index > 0)))
    with pytest.raises(DataError, match='base_margin "m0" is null, NaN or infinite in 300 of 300 rows'):
        predicted(tmp_path, uri, rows.assign(m0=np.inf))


class Forking(mlflow.pyfunc.PythonModel):
    """A model that forks while it predicts, and notes the exit code of its child."""

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> np.ndarray:
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            Path(os.environ["EXIT_CODE"]).write_text(str(code))
        return model_input["a"].to_numpy()


@pytest.mark.processes
def test_a_process_that_a_model_forks_does_not_go_on_with_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXIT_CODE", str(tmp_path / "code"))
    mlflow.pyfunc.save_model(tmp_path / "model", python_model=Forking(), pip_requirements=[])
    process = os.getpid()
    try:
        found = predicted(tmp_path, str(tmp_path / "model"), NUMBERS, input_cols=["a", "zip"])
    finally:
        if os.getpid() != process:
            os._exit(42)
    np.testing.assert_array_equal(found, NUMBERS["a"])
    assert (tmp_path / "code").read_text() == "1"
