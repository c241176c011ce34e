from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm.library import LightGBM
from shoal.training.xgboost.library import XGBoost


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


def margined(framework: str, params: dict[str, Any], **margins: Any) -> TrainRequest:
    return TrainRequest(
        framework=framework, dataset={"paths": ("rows",)}, input_cols=("a",), label_col="y", params=params, **margins
    )


@pytest.mark.parametrize(
    ("library", "framework", "objective"),
    [(XGBoost(), "xgboost", "multi:softprob"), (LightGBM(), "lightgbm", "multiclassova")],
)
def test_there_is_one_column_of_margins_per_output(library: Any, framework: str, objective: str) -> None:
    size = GangShape(1, 1)
    classes = {"objective": objective, "num_class": 3}
    library.params(margined(framework, classes, base_margin_cols=("m0", "m1", "m2")), size, UserCode())
    library.params(margined(framework, {}, base_margin_cols=("m0",)), size, UserCode())
    with pytest.raises(InvalidArgumentError, match=r"has 3 output.*the number given is 1 \(m\)"):
        library.params(margined(framework, classes, base_margin_col="m"), size, UserCode())
    with pytest.raises(InvalidArgumentError, match=r"has 1 output.*the number given is 2 \(m0, m1\)"):
        library.params(margined(framework, {}, base_margin_cols=("m0", "m1")), size, UserCode())
    with pytest.raises(InvalidArgumentError, match="base_margin_col and base_margin_cols are both set"):
        margined(framework, classes, base_margin_col="m", base_margin_cols=("m0", "m1", "m2"))
