"""A further boosting library is its code and a line in the registry: fit, spec, claim, trials, gate and many."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

REGISTERED = """
from typing import Literal
from shoal import boosting_libraries
from shoal.boosting_libraries import BOOSTING_LIBRARIES, Registered
BOOSTING_LIBRARIES["sklearn"] = Registered("scikit-learn", "tests.support.hist_gradient:HistGradient", (), "")
boosting_libraries.Framework = Literal[*BOOSTING_LIBRARIES]  # as if the line stood there
from tests.training.boosting.test_further_library import use
use()
"""


@pytest.mark.processes
def test_a_library_that_is_registered_by_one_line_trains_and_predicts() -> None:
    # Its OpenMP threads would wait for each other on a machine with few free CPUs.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", REGISTERED], check=True, timeout=300, env=environment)


def use() -> None:
    import tempfile
    from pathlib import Path

    import numpy as np
    import pandas as pd
    import pyarrow as pa

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

    table = pd.DataFrame(np.random.default_rng(1).normal(size=(500, 3)).astype(np.float32), columns=["a", "b", "y"])
    table["y"] += 2 * table["a"]
    with tempfile.TemporaryDirectory() as folder, nodes_without_ray(2):
        file = str(Path(folder, "rows.parquet"))
        table.to_parquet(file)
        options: dict[str, Any] = {
            "framework": "sklearn",
            "dataset": {"paths": (file,)},
            "eval_set": {"holdout": {"paths": (file,)}},
            "input_cols": ("a", "b"),
            "label_col": "y",
            "n_estimators": 8,
            "params": {"learning_rate": 0.2},
            "scaling_config": {"num_workers": 1},
            "run_config": {"pool_name": "here", "checkpoint_every": 5},
        }
        spec = JobSpec(**options)
        assert JobSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True)) == spec
        # The queue's claim has no GPU, although all nodes have some.
        assert spec.demand().gang.claim([NodeSize(2, 1)]).gpus == 0
        found = train(spec)
        end_gangs()
        plain = HistGradient().train_rows(
            {"data": table[["a", "b"]].to_numpy(), "label": table["y"].to_numpy(), "weight": None},
            {"learning_rate": 0.2, "seed": 0},
            8,
            None,
        )
        predictions = predictor_of(found.booster(), ["a", "b"]).predict_table(pa.Table.from_pandas(table))
        np.testing.assert_array_equal(predictions, plain.predict(table[["a", "b"]].to_numpy()))
        history = found.eval_results["holdout"]["mse"]
        assert len(history) == 8 and history[-1] < history[0]

        size = GangShape(1, 2)
        plan = TrialPlan(TrainRequest(**options), size, UserCode(), None, samples=[{"learning_rate": 0.1}])
        assert (plan.compared_by, plan.direction) == ("mse", "minimize")
        context = GangContext()
        trial = plan.trials.train(plan.trials.trainer(context), plan.checked({"n_estimators": 5}), lambda *_: None)
        assert trial.rounds == 5 and trial.value == pytest.approx(history[4])

        output = HistGradient().output_of({}, custom_objective=False)
        gate.try_challenger(Register(model="m", metric="rmse", holdout={"paths": (file,)}), output)

        training = EstimatorTraining("sklearn", {"learning_rate": 0.2, "seed": 0}, 8, ("a", "b"), "y")
        stored = training(pa.Table.from_pandas(table), "key")
        assert stored.kind == "sklearn"
        own = predicted_by(loaded(stored.kind, stored.content), table, ())
        np.testing.assert_array_equal(own, predictions)
