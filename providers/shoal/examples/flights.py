"""The spec of the flight retraining example: train on the flights of all months before a month, and compare the model
with the champion (the registered version in use) on this month."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError
from shoal.examples.flights_data import FEATURES, LABEL, month_files

if TYPE_CHECKING:
    from shoal.kinds.training.spec import JobSpec

MODEL = "flight-delays"
POOL = "local://flights?max_nodes=4&libraries=xgboost,mlflow"
PARAMS = {"objective": "reg:squarederror", "eta": 0.1, "max_depth": 8, "subsample": 0.9, "eval_metric": "rmse"}


def retraining_spec(month: int, *, n_estimators: int = 100) -> JobSpec:
    """Return the spec of a job that trains on the months before `month` and evaluates the model on `month`.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12.
    """
    check_month(month)
    from shoal.data import DataConnector
    from shoal.kinds.training.spec import JobSpec

    return JobSpec.parse(
        {
            "dataset": DataConnector.from_parquet(month_files(range(1, month))),
            "input_cols": FEATURES,
            "label_col": LABEL,
            "params": PARAMS,
            "n_estimators": n_estimators,
            "register": {"model": MODEL, "metric": "rmse", "holdout": DataConnector.from_parquet(month_files([month]))},
            "tracking": {"experiment": MODEL, "run_name": f"until 2013-{month - 1:02}"},
        }
    )


def check_month(month: int) -> None:
    """Check that `month` is from 2 to 12, because the model is trained on the months of 2013 before `month`.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12.
    """
    if not 2 <= month <= 12:
        raise InvalidArgumentError(
            f"the month must be from 2 to 12, not {month}, because the model is trained on the months before this month"
        )
