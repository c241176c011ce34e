from __future__ import annotations

import math

from shoal.training.boosting.request import TrainResult


def test_a_metric_that_is_no_number_survives_json() -> None:
    result = TrainResult(
        model=b"\x00\xff",
        eval_results={"eval": {"auc": [0.5, math.nan, math.inf]}},
        rounds=3,
        rows=1,
        num_workers=1,
        threads_per_worker=1,
        seconds=0.1,
        workers=(),
    )
    back = TrainResult.model_validate_json(result.model_dump_json())
    assert back.model == result.model
    values = back.eval_results["eval"]["auc"]
    assert values[0] == 0.5
    assert math.isnan(values[1])
    assert values[2] == math.inf
