"""Which columns of a query a job copies: those that its spec names, if it names all that the job reads."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.jobs import parse_spec

QUERY = {"sql": "SELECT * FROM trips ORDER BY id", "connection": "warehouse"}
TIMED = {**QUERY, "time_col": "day"}
TRAINING = {"dataset": QUERY, "input_cols": ["a", "b"], "label_col": "y", "weight_col": "w"}
BY_STORE = {"framework": "partitions", "dataset": QUERY, "by": "store", "function": "p:f"}
REGISTER = {"model": "m", "metric": "rmse"}


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        (TRAINING, ["a", "b", "y", "w"]),
        ({**TRAINING, "dataset": TIMED, "eval_set": {"e": QUERY}}, ["a", "b", "y", "w", "day"]),
        ({**TRAINING, "dataset": TIMED, "register": {**REGISTER, "holdout": TIMED}}, ["a", "b", "y", "w", "day"]),
        ({**TRAINING, "dataset": {**QUERY, "expect": {"nulls": {"c": 0.1}, "unique": [["id", "a"]]},
                                  "time_split": {"column": "t", "holdout": 7, "part": "train"}}},
         ["a", "b", "y", "w", "t", "c", "id"]),
        # Without times, only whole rows show that the holdout has rows of the training.
        ({**TRAINING, "dataset": TIMED, "register": {**REGISTER, "holdout": QUERY}}, None),
        ({"framework": "tune", "train": TRAINING, "space": {"eta": [0.1, 0.3]}}, ["a", "b", "y", "w"]),
        ({"framework": "tune", "train_func": "p:f", "dataset_map": {"train": QUERY}, "space": {"x": [1, 2]}}, None),
        (BY_STORE, None),
        ({**BY_STORE, "columns": ["a"]}, ["store", "a"]),
        (
            {"framework": "partitions", "dataset": QUERY, "by": "store",
             "estimator": {"input_cols": ["a"], "label_col": "y"}},
            ["store", "a", "y"],
        ),
        ({"framework": "predict", "dataset": QUERY, "model": "models:/m@champion", "output_path": "/x"}, None),
        ({"framework": "pytorch", "train_func": "p:f", "dataset_map": {"train": QUERY}}, None),
    ],
)  # fmt: skip
def test_columns_that_the_spec_names(fields: dict[str, Any], used: list[str] | None) -> None:
    assert parse_spec(fields).used_columns() == used
