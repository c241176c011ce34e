"""Trainings of either boosting library on rows of the two nodes, and the same by the plain library in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.data import DataConnector
from shoal.training.boosting import engine
from shoal.training.boosting.messages import Segment
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.gang import Gang
from tests.support.two_node_cluster import COLUMNS, write_rows

LIBRARIES = tuple(BOOSTING_LIBRARIES)

PLAIN: dict[str, dict[str, Any]] = {"xgboost": {"max_depth": 3}, "lightgbm": {"num_leaves": 15, "learning_rate": 0.3}}
SAMPLED: dict[str, dict[str, Any]] = {
    "xgboost": {"max_depth": 3, "subsample": 0.5, "colsample_bynode": 0.7},
    "lightgbm": {**PLAIN["lightgbm"], "bagging_fraction": 0.5, "bagging_freq": 1, "feature_fraction": 0.7},
}
DART: dict[str, dict[str, Any]] = {
    "xgboost": {"max_depth": 3, "booster": "dart", "rate_drop": 0.2},
    "lightgbm": {**PLAIN["lightgbm"], "boosting": "dart", "drop_rate": 0.5},
}
_FIXED: dict[str, dict[str, Any]] = {
    "xgboost": {"nthread": 1},
    "lightgbm": {"verbosity": -1, "deterministic": True, "force_col_wise": True, "num_threads": 1},
}


def spec(path: Path) -> dict[str, Any]:
    return {"paths": (str(path),)}


def request(rows: Path, framework: str = "xgboost", **changes: Any) -> TrainRequest:
    values = {
        "framework": framework,
        "dataset": spec(rows),
        "input_cols": tuple(COLUMNS),
        "label_col": "y",
        "n_estimators": 10,
        "params": PLAIN[framework],
    }
    return TrainRequest(**{**values, **changes})


def resumable(rows: Path, max_restarts: int = 0, framework: str = "xgboost", **changes: Any) -> TrainRequest:
    """A training with a checkpoint after every fourth round."""
    wanted = request(rows, framework, **changes)
    changed = wanted.run_config.model_copy(update={"checkpoint_every": 4, "max_restarts": max_restarts})
    return wanted.model_copy(update={"run_config": changed})


def frame(rows: Path) -> pd.DataFrame:
    return DataConnector.from_parquet(rows).to_pandas()


def alone(framework: str, rows: Path, rounds: int, objective: Callable[..., Any] | None = None) -> Any:
    """The booster that the plain library makes of the rows."""
    table, params = frame(rows), {**PLAIN[framework], **_FIXED[framework]}
    if framework == "xgboost":
        import xgboost

        matrix = xgboost.QuantileDMatrix(table[COLUMNS], table["y"], nthread=1)
        return xgboost.train(params, matrix, rounds, obj=objective)
    import lightgbm

    data = lightgbm.Dataset(table[COLUMNS].to_numpy(), table["y"].to_numpy(), feature_name=COLUMNS)
    return lightgbm.train({**params, **({"objective": objective} if objective else {})}, data, rounds)


def trees(booster: Any) -> Any:
    """What two boosters with the same trees have in common."""
    if hasattr(booster, "get_dump"):
        return booster.get_dump(with_stats=True)
    text = booster.model_to_string()
    return text[text.index("Tree=0") : text.index("end of trees")]


def predicted(booster: Any, table: pd.DataFrame, margin: str | None = None) -> np.ndarray:
    """What the library itself predicts with the best round."""
    if hasattr(booster, "get_dump"):
        import xgboost

        matrix = xgboost.DMatrix(table[COLUMNS], base_margin=None if margin is None else table[margin])
        best = booster.attr("best_iteration")
        return booster.predict(matrix, iteration_range=(0, 0 if best is None else int(best) + 1))
    return booster.predict(table[COLUMNS]) + (0 if margin is None else table[margin].to_numpy())


def rmse(booster: Any, rows: Path) -> float:
    table = frame(rows)
    return float(np.sqrt(np.mean((predicted(booster, table) - table["y"]) ** 2)))


def without_statistics(folder: Path, column: str, values: list[float | None]) -> Path:
    """A dataset whose footers do not tell of its nulls."""
    table = pq.read_table(write_rows(folder / "made", rows=3_000, files=1))
    index = table.column_names.index(column)
    nulled = pa.array([*values, *table[column].to_pylist()[len(values) :]], pa.float32())
    (folder / "bad").mkdir()
    pq.write_table(
        table.set_column(index, column, nulled),
        folder / "bad" / "rows.parquet",
        row_group_size=1_000,
        write_statistics=False,
    )
    return folder / "bad"


class Losses:
    """Kills a worker, or does something else, before certain segments, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *segments: int, deed: Any = None) -> None:
        self.left = list(segments)
        self.seen: list[Segment] = []
        self.lost: list[int] = []
        on_all = engine.Training._on_all

        def act(training: Any, gang: Gang, name: str, args: Sequence[tuple[Any, ...]], **how: Any) -> list[Any]:
            if name == "boost":
                [segment] = args[0]
                self.seen.append(segment)
                if self.left and segment.index == self.left[0]:
                    self.left.pop(0)
                    self.lost.append(gang.workers[-1].pid)
                    (deed or (lambda: os.kill(gang.workers[-1].pid, signal.SIGKILL)))()
            return on_all(training, gang, name, args, **how)

        monkeypatch.setattr(engine.Training, "_on_all", act)
