"""A further boosting library is its code and a line in the registry: fit, spec, claim, trials, many, and on a pool
gate, champion, batch prediction and page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.support import registered

REGISTRATION = """
from typing import Literal
from shoal import boosting_libraries
from shoal.boosting_libraries import BOOSTING_LIBRARIES, Registered
library = Registered("scikit-learn", "tests.support.hist_gradient:HistGradient", ("scikit-learn",), "")
BOOSTING_LIBRARIES["sklearn"] = library
boosting_libraries.Framework = Literal[*BOOSTING_LIBRARIES]  # as if the line stood there
"""


def options_on(table: pd.DataFrame) -> dict[str, Any]:
    table.to_parquet("rows.parquet")
    rows = {"paths": (os.path.abspath("rows.parquet"),)}
    return {
        "framework": "sklearn",
        "dataset": rows,
        "eval_set": {"holdout": rows},
        "input_cols": ("a", "b"),
        "label_col": "y",
        "n_estimators": 8,
        "params": {"learning_rate": 0.2},
        "scaling_config": {"num_workers": 1},
        "run_config": {"pool_name": "here", "checkpoint_every": 5},
    }


def some_rows(seed: int) -> pd.DataFrame:
    table = pd.DataFrame(np.random.default_rng(seed).normal(size=(500, 3)).astype(np.float32), columns=["a", "b", "y"])
    table["y"] += 2 * table["a"]
    return table


def alone() -> None:
    from shoal.errors import InvalidArgumentError
    from shoal.jobs.register import Register
    from shoal.kinds.partitions.partition_messages import EstimatorTraining, loaded
    from shoal.kinds.partitions.predictions import predicted_by
    from shoal.kinds.training.spec import JobSpec
    from shoal.models import gate
    from shoal.models.loading import predictor_of
    from shoal.training.boosting.engine import train
    from shoal.training.boosting.params import UserCode
    from shoal.training.boosting.request import TrainRequest
    from shoal.training.boosting.trials import TrialPlan
    from shoal.training.demand import NodeSize
    from shoal.training.gang.gang import end_gangs
    from shoal.training.gang.placement import GangShape
    from shoal.training.reporting import GangContext
    from tests.support.hist_gradient import HistGradient
    from tests.support.without_ray import nodes_without_ray

    table = some_rows(1)
    options = options_on(table)
    with nodes_without_ray(2):
        spec = JobSpec(**options)
        assert JobSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True)) == spec
        # The queue's claim has no GPU, although all nodes have some.
        assert spec.demand().gang.claim([NodeSize(2, 1)]).gpus == 0
        found = train(spec)
        end_gangs()
        plain = HistGradient().train_rows(
            {"data": table[["a", "b"]], "label": table["y"].to_numpy(), "weight": None},
            {"learning_rate": 0.2, "seed": 0},
            8,
            None,
        )
        predictions = predictor_of(found.booster(), ["a", "b"]).predict_table(pa.Table.from_pandas(table))
        np.testing.assert_array_equal(predictions, plain.predict(table[["a", "b"]]))
        history = found.eval_results["holdout"]["mse"]
        assert len(history) == 8 and history[-1] < history[0]

        size = GangShape(1, 2)
        plan = TrialPlan(TrainRequest(**options), size, UserCode(), None, samples=[{"learning_rate": 0.1}])
        assert (plan.compared_by, plan.direction) == ("mse", "minimize")
        context = GangContext()
        trial = plan.trials.train(plan.trials.trainer(context), plan.checked({"n_estimators": 5}), lambda *_: None)
        assert trial["rounds"] == 5 and trial["value"] == pytest.approx(history[4])

        output = HistGradient().output_of({}, custom_objective=False)
        with pytest.raises(InvalidArgumentError, match="scikit-learn cannot continue from a model: remove init_model"):
            train(spec.model_copy(update={"init_model": "model.pkl"}), init_model=found.model)
        gate.try_challenger(Register(model="m", metric="rmse", holdout=options["dataset"]), output)

        training = EstimatorTraining("sklearn", {"learning_rate": 0.2, "seed": 0}, 8, ("a", "b"), "y")
        stored = training(pa.Table.from_pandas(table), "key")
        assert stored.kind == "sklearn"
        own = predicted_by(loaded(stored.kind, stored.content), table, ())
        np.testing.assert_array_equal(own, predictions)


def on_a_pool() -> None:
    from fastapi.testclient import TestClient

    from shoal import ComputePool
    from shoal.data import DataConnector
    from shoal.distributors.batch_prediction import predict
    from shoal.distributors.call import Call
    from shoal.jobs import attach
    from shoal.jobs.kind import call_of, parse_spec
    from shoal.ui.access import TokenAccess
    from shoal.ui.app import create_app
    from tests.support.browser import TOKEN

    options, holdout = options_on(some_rows(1)), some_rows(2)
    options |= {"tracking": {}, "eval_set": {"recent": options["dataset"]}}
    holdout.to_parquet("holdout.parquet")
    register = {"model": "waves", "metric": "rmse", "holdout": {"paths": (os.path.abspath("holdout.parquet"),)}}
    pool = ComputePool("local://here?max_nodes=1&ray=false").up()
    try:
        for job, rounds in (("first", 8), ("second", 30)):
            config = {"pool_name": "here", "job_id": job}
            spec = parse_spec(
                {**options, "n_estimators": rounds, "run_config": config, "register": register, "tracking": {}}
            )
            booster = Call(call_of(spec)).submit().result()
            result = attach(job).status().result
            assert result is not None and result.decision is not None and result.decision.promote, result
        assert result.decision.reason == "better" and result.model_version == "2"
        expected = booster.predict(holdout[["a", "b"]])
        predict("models:/waves@champion", DataConnector.from_parquet("holdout.parquet"), os.path.abspath("predicted"))
        np.testing.assert_array_equal(pd.read_parquet("predicted").prediction, expected)
        app = create_app(access=TokenAccess(TOKEN, "cli:tester@host"))
        with TestClient(app, base_url="http://127.0.0.1:8000") as client:
            page = client.get(f"/jobs/second?token={TOKEN}").text
            for shown in ("<dd>sklearn</dd>", "<dt>recent-mse</dt>", "version 2 is the champion"):
                assert shown in page, page
            assert "waves" in client.get("/models/waves").text
        app.state.reader.close()
    finally:
        pool.down()


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("use", [alone, on_a_pool])
def test_a_library_that_is_registered_by_one_line_is_used(
    use: Callable[[], None], tmp_path: Path, fresh_home: Path
) -> None:
    registered.run(use, REGISTRATION, tmp_path, fresh_home)
