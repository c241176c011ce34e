"""The gate of one registered model: models enter one after the other, and become champion or not.

The registry is a real MLflow database, the models are real pyfunc models and one real ranker.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.models import infer_signature

from shoal.data import DataConnector
from shoal.jobs import Register, Tracking
from shoal.jobs.driver.attempt_context import AttemptContext, Stopwatch
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.mlflow_run import Run
from shoal.models import loading, training_record
from shoal.models.contest import Outcome
from shoal.models.gate import enter
from shoal.models.loading import Predictor
from shoal.state import Store
from shoal.state.schema import Job
from tests.support.job_store import POOL

KEY = Key("job", 1)
INPUTS = ["a", "late"]


class Linear(mlflow.pyfunc.PythonModel):
    """Predicts ``slope * a + offset``, and something else where `late` is set."""

    def __init__(self, slope: float, offset: float = 0.0, late: float = 0.0) -> None:
        self.weights = (slope, offset, late)

    def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
        slope, offset, late = self.weights
        return (slope * model_input["a"] + offset + late * model_input["late"]).to_numpy()


MODELS: dict[str, Linear] = {
    "constant": Linear(0.0, 1.5),
    "worse than the mean": Linear(-3.0),
    "fair": Linear(2.0, 0.5),
    "good": Linear(2.9, 0.05),
    "good but for those who are late": Linear(3.0, 0.0, 0.4),
    "exact": Linear(3.0),
    "not a number": Linear(float("nan")),
}


def frame(seed: int, rows: int = 200) -> pd.DataFrame:
    """Rows whose label is three times `a`; every tenth one is late."""
    a = np.random.default_rng(seed).random(rows)
    late = np.arange(rows) % 10 == 0
    return pd.DataFrame(
        {"a": a, "late": late.astype(float), "when": np.where(late, "late", "on time"), "query": np.arange(rows) // 8}
    ).assign(y=3 * a, relevance=(4 * a).astype(int))


def attempt_of(store: Store, key: Key = KEY) -> AttemptContext:
    """What the driver of an attempt hands on, without a run in MLflow."""
    return AttemptContext(
        store, key, None, {}, {}, print, MetricSeries(key), print, Stopwatch(Job(created_at=0.0), 0.0)
    )


@dataclasses.dataclass
class Gate:
    """One registered model: models enter, and the run says what was decided."""

    store: Store
    run: Run
    data: Path
    uris: dict[str, str]
    name: str

    def register(self, **options: Any) -> Register:
        holdout = DataConnector.from_parquet(self.data / "holdout.parquet")
        return Register(**{"model": self.name, "metric": "rmse", "holdout": holdout, **options})

    def enter(
        self,
        model: str,
        *,
        trained_on: str | DataConnector = "train",
        time_col: str | None = None,
        run: Run | None = None,
        label_col: str = "y",
        tags: Mapping[str, str] | None = None,
        loaded: Predictor | None = None,
        key: Key = KEY,
        **options: Any,
    ) -> Outcome:
        dataset = trained_on
        if isinstance(dataset, str):
            dataset = DataConnector.from_parquet(self.data / f"{trained_on}.parquet")
        rows = training_record.of_datasets([(dataset, dataset.time_range(time_col) if time_col else None)])
        return enter(
            attempt_of(self.store, key),
            run or self.run,
            self.register(**options),
            tags=tags,
            model_uri=self.uris[model],
            model=loaded or loading.load(self.uris[model]),
            label_col=label_col,
            group_col="query",
            trained_on=rows,
        )

    def champion(self) -> str | None:
        version = self.run.client.get_registered_model(self.name).aliases.get("champion")
        return None if version is None else str(version)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    for seed, name in enumerate(("train", "holdout")):
        rows = frame(seed)
        rows.assign(day=days(seed, len(rows))).to_parquet(folder / f"{name}.parquet", row_group_size=80)
    rows = frame(2)
    rows.assign(day=days(1, len(rows))).to_parquet(folder / "the holdout's days.parquet")
    rows.assign(day=days(2, len(rows))).to_parquet(folder / "later days.parquet")
    return folder


def days(month: int, rows: int) -> Any:
    """A day of the month for each row; month 0 is January 2024."""
    return (pd.Timestamp(2024, month + 1, 1) + pd.to_timedelta(np.arange(rows) % 28, unit="D")).date


@pytest.fixture(scope="session")
def uris(mlflow_uri: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models, each logged once: a version is made of one in each test."""
    import xgboost

    mlflow.set_tracking_uri(mlflow_uri)
    artifacts = tmp_path_factory.mktemp("artifacts").as_uri()
    experiment = mlflow.MlflowClient(mlflow_uri).create_experiment("the gate's table", artifact_location=artifacts)
    rows = frame(0)
    signature = infer_signature(rows[INPUTS], rows["y"])
    matrix = xgboost.DMatrix(rows[INPUTS], rows["relevance"], qid=rows["query"])
    ranker = xgboost.train({"objective": "rank:ndcg", "nthread": 1}, matrix, 10)
    with mlflow.start_run(experiment_id=experiment):
        uris = {
            name: mlflow.pyfunc.log_model(
                name="linear", python_model=model, signature=signature, pip_requirements=[]
            ).model_uri
            for name, model in MODELS.items()
        }
        logged = mlflow.xgboost.log_model(ranker, name="ranker", signature=signature, pip_requirements=[])
        return {**uris, "ranker": logged.model_uri}


@pytest.fixture
def gate(
    store: Store, mlflow_uri: str, data: Path, uris: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Gate]:
    attempts.ask(store, Order("job", POOL, "cli:me@here", {"fingerprint": "q"}, {}, None), 0.0)
    attempts.start(store, KEY, {}, 0.0)
    run = Run.begin(Tracking(uri=mlflow_uri, experiment="rules"), name="job-1", tags={})
    yield Gate(store, run, data, uris, re.sub(r"\W+", "-", request.node.name))
    mlflow.end_run()
