"""The two networks of the PyTorch examples, trained by two workers as jobs on a real pool."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal import ComputePool, jobs
from shoal.data import DataConnector
from shoal.examples import delays, digits
from shoal.jobs import FunctionJobSpec, Tracking

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")


def on(pool: ComputePool, spec: FunctionJobSpec, tracking: Tracking) -> FunctionJobSpec:
    run_config = spec.run_config.model_copy(update={"pool_name": pool.name})
    return spec.model_copy(update={"run_config": run_config, "tracking": tracking})


@pytest.mark.long
def test_digits_are_learned_judged_and_registered(pool: ComputePool, tracking: Tracking) -> None:
    import mlflow

    spec = on(pool, digits.training_spec(epochs=12), tracking)
    assert jobs.parse_spec(json.loads(json.dumps(spec.document()))) == spec

    result = jobs.submit(spec).wait(on_log=None)

    assert result.metrics["holdout-accuracy"] > 0.93
    assert (result.num_workers, result.model_version, result.promoted) == (2, "1", True)
    assert [rank["train-loss"] for rank in jobs.load_results(result).results] == [result.metrics["train-loss"]] * 2
    mlflow.set_tracking_uri(tracking.uri)
    served = mlflow.pyfunc.load_model(f"models:/{digits.MODEL}@champion")
    images = DataConnector.from_parquet(digits.digit_files()[1]).to_pandas()
    predicted = served.predict(images[list(digits.PIXELS)].to_numpy("float32"))
    assert np.mean(predicted.argmax(axis=1) == images[digits.LABEL]) == pytest.approx(
        result.metrics["holdout-accuracy"]
    )
    losses = mlflow.MlflowClient().get_metric_history(result.mlflow_run_id, "train-loss")
    assert [metric.step for metric in losses] == list(range(12))
    assert losses[-1].value < losses[0].value / 4


@pytest.mark.long
def test_delays_are_learned_and_the_better_network_is_the_champion(pool: ComputePool, tracking: Tracking) -> None:
    spec = on(pool, delays.training_spec(month=2, epochs=2), tracking)
    anything = spec.register_as.model_copy(update={"baseline": None})
    worse = spec.model_copy(update={"hyper_params": {**spec.hyper_params, "rate": 1e-6}, "register_as": anything})

    first = jobs.submit(worse).wait(on_log=None)
    second = jobs.submit(spec).wait(on_log=None)

    assert (first.promoted, second.promoted) == (True, True)
    assert second.champion is not None
    assert second.champion.value == pytest.approx(first.metrics["holdout-rmse"])
    assert second.metrics["holdout-rmse"] < 25 < second.champion.value
