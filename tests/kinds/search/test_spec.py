"""Specs of searches."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.kinds.search.spec import TuneJobSpec

ROWS = DatasetSpec(paths=("/holdout.parquet",))


def registering(holdout: DatasetSpec | None, gate: DatasetSpec, **options: Any) -> dict[str, Any]:
    return {
        "train": {"dataset": DatasetSpec(paths=("/rows.parquet",)), "input_cols": ["a"], "label_col": "y"},
        "space": {"max_depth": [2, 3]},
        "holdout": holdout,
        "register": {"model": "m", "metric": "rmse", "holdout": gate, **options},
    }


def test_a_search_does_not_choose_on_the_rows_of_the_gate():
    same = ROWS.model_copy(update={"time_col": "day"})
    with pytest.raises(InvalidArgumentError, match=r"register\.holdout is the holdout on which the search chooses"):
        TuneJobSpec.parse(registering(ROWS, same))
    TuneJobSpec.parse(registering(ROWS, same, overlap="flag"))
    TuneJobSpec.parse(registering(ROWS, DatasetSpec(paths=("/others.parquet",))))
    TuneJobSpec.parse(registering(ROWS, ROWS.model_copy(update={"filters": [[("day", ">", 3)]]})))
    TuneJobSpec.parse(registering(None, ROWS))


def test_the_direction_of_a_function_with_a_named_metric_must_be_given():
    fields = {"train_func": "pkg.module:trial", "space": {"x": [1, 2]}}
    with pytest.raises(InvalidArgumentError, match='the metric "score" of a function is better: set direction='):
        TuneJobSpec.parse({**fields, "metric": "score"})
    TuneJobSpec.parse({**fields, "metric": "score", "direction": "maximize"})
    TuneJobSpec.parse(fields)
