"""scikit-learn's HistGradientBoosting as a further boosting library, for one worker and numbers without weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from shoal.errors import InvalidArgumentError
from shoal.jobs.mlflow_run import MARK
from shoal.training.boosting.library import BoosterPredictor, Library, Output
from shoal.training.boosting.messages import Boosted, Checkpoint, Prepared, Segment, Task
from shoal.training.boosting.params import ROUNDS, Directions, Names, seed_in
from shoal.training.boosting.rows import ShardRows
from shoal.training.host import memory


def estimator(params: Mapping[str, Any], **more: Any) -> Any:
    from sklearn import ensemble

    return ensemble.HistGradientBoostingRegressor(**params, early_stopping=False, warm_start=True, **more)


class HistGradient(Library):
    name = "sklearn"  # type: ignore[assignment]
    worker = "tests.support.hist_gradient"
    names = Names("scikit-learn", {"random_state": "seed", "max_iter": ROUNDS}, {})
    metric_param = "metric"
    file_name = "model.pkl"
    gpus_by_default = False

    def check_request(self, request: Any) -> None:
        self.check_feature_names(request.input_cols, "")

    def device_of(self, params: Mapping[str, Any]) -> str:
        return "cpu"

    def why_cpu(self) -> str:
        return "scikit-learn trains on CPUs"

    def objective_of(self, params: Mapping[str, Any]) -> str:
        return str(params.get("loss", "squared_error"))

    def params(self, request: Any, size: Any, user_code: Any, init_model: Any = None) -> tuple[dict[str, Any], int]:
        if size.num_workers > 1:
            raise InvalidArgumentError("scikit-learn trains in one worker: set num_workers=1")
        merged = self.merged(request)
        estimator(merged)  # raises TypeError
        return merged, seed_in(merged, request.run_config.seed, self.names)

    def metrics(self, request: Any, params: Mapping[str, Any], user_code: Any) -> Directions:
        return {"mse": "minimize"}

    def load(self, trained: Any) -> Any:
        return self.booster_of(trained.model)

    def output_of(self, params: Mapping[str, Any], *, custom_objective: bool) -> Output:
        return Output(self.objective_of(params))

    def predictor(self, model: Any, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()) -> Any:
        return BoosterPredictor(lambda table, _: model.predict(table.to_pandas()), tuple(input_cols), {})

    def features_of(self, model: Any) -> list[str]:
        return [str(name) for name in model.feature_names_in_]

    def num_features(self, model: Any) -> int:
        return int(model.n_features_in_)

    def as_sklearn(self, *given: Any) -> Any:
        return given[0]

    def owns(self, model: Any) -> bool:
        return super().owns(model) and type(model).__name__.startswith("HistGradientBoosting")

    is_booster = owns

    def log_model(self, booster: Any, **options: Any) -> Any:
        return super().log_model(booster, serialization_format="cloudpickle", **options)

    def has_logged(self, info: Any) -> bool:
        return super().has_logged(info) and MARK in (info.metadata or {})  # and not any model of scikit-learn

    def content_of(self, booster: Any) -> bytes:
        return pickle.dumps(booster)

    serialised = content_of

    def booster_of(self, content: bytes) -> Any:
        return pickle.loads(content)

    def train_rows(self, rows: Any, params: Mapping[str, Any], rounds: int, user_code: Any) -> Any:
        rest = {name: value for name, value in params.items() if name != "seed"}
        model = estimator(rest, max_iter=rounds, random_state=params["seed"])
        return model.fit(rows["data"], rows["label"], rows["weight"])

    def predict_rows(self, booster: Any, rows: pd.DataFrame) -> np.ndarray:
        return booster.predict(rows)


class Session:
    def __init__(self, task: Task) -> None:
        self.data = {}
        for name, part in {"": task.train, **task.eval_sets}.items():
            batches = [*ShardRows(part, task.columns, 2**30)]
            features, label = (np.concatenate([getattr(each, kind) for each in batches]) for kind in ("data", "label"))
            self.data[name] = (pd.DataFrame(features, columns=list(task.columns.features)), label)
        self.model = estimator(task.params, random_state=task.seed)

    def boost(self, segment: Segment) -> Boosted:
        if segment.resume is not None and segment.resume.model:
            self.model = pickle.loads(segment.resume.model)
        self.model.set_params(max_iter=segment.stop).fit(*self.data[""])
        history = {}
        for name, (features, label) in self.data.items():
            history[name] = {"mse": [((each - label) ** 2).mean() for each in self.model.staged_predict(features)]}
        del history[""]
        state = Checkpoint(segment.stop, pickle.dumps(self.model), history)
        return Boosted(False, state, None, None, 0.0, memory.peak_rss_bytes())


_sessions: list[Session] = []


def prepare(task: Task) -> Prepared:
    _sessions.append(Session(task))
    return Prepared(1, 0.0, 0.0, 0)


def boost(segment: Segment) -> Boosted:
    return _sessions[-1].boost(segment)


def finish() -> None:
    _sessions.clear()


class Trials:
    def __init__(self, context: Any) -> None: ...

    def boost(self, task: Task, on_round: Any) -> Callable[[Segment], Boosted]:
        return Session(task).boost
