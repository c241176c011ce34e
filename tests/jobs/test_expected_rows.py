"""Real jobs whose rows are not as expected, or differ too much from those of the champion: refused before workers
start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal import ComputePool, jobs
from shoal.errors import JobFailedError
from shoal.jobs import JobHandle, JobSpec
from shoal.models.drift import DRIFT_TAG, PROFILE_TAG
from tests.support.pool_processes import nothing_left

pytestmark = pytest.mark.processes


@pytest.fixture
def small_pool(fresh_home: Path) -> Iterator[ComputePool]:
    """One node of one CPU, without Ray."""
    pool = ComputePool("local://small?max_nodes=1&ray=false").up()
    yield pool
    pool.down()
    nothing_left()


def write(path: Path, shift: float) -> None:
    a, b = np.random.default_rng(0).random((2, 600))
    days = [date(2024, 1, 1) + timedelta(days=i // 20) for i in range(600)]
    pq.write_table(pa.table({"a": a + shift, "b": b, "y": 3 * (a + shift) + b, "day": days}), path, row_group_size=150)


def test_rows_are_checked_before_the_training_and_compared_with_the_champions(
    small_pool: ComputePool, mlflow_database: Path, tmp_path: Path
) -> None:
    uri = f"sqlite:///{shutil.copy(mlflow_database, tmp_path)}"

    def submitted(rounds: int, expect: dict[str, Any]) -> JobHandle:
        def part(name: str, **options: Any) -> dict[str, Any]:
            split = {"column": "day", "holdout": 7, "gap": 1, "part": name}
            return {"paths": [str(tmp_path / "rows.parquet")], "time_split": split, **options}

        fields = {
            "framework": "xgboost",
            "dataset": part("train", expect=expect),
            "input_cols": ["a", "b"],
            "label_col": "y",
            "n_estimators": rounds,
            "register": {"model": "m", "metric": "rmse", "holdout": part("holdout")},
            "tracking": {"uri": uri},
            "run_config": {"pool_name": small_pool.name},
        }
        return jobs.submit(JobSpec.parse(fields))

    def refusal(rounds: int, expect: dict[str, Any]) -> str:
        handle = submitted(rounds, expect)
        with pytest.raises(JobFailedError) as failed:
            handle.wait(on_log=None)
        log = "\n".join(handle.logs())
        assert "model trained" not in log and "memory of the largest worker" not in log and failed.value.permanent
        return str(failed.value)

    write(tmp_path / "rows.parquet", shift=0.0)
    lines: list[str] = []
    expect = {"rows": {"min": 440, "max": 440}, "unique": ["a"], "drift": {"max": 0.1}}
    first = submitted(10, expect).wait(on_log=lines.append)
    assert (first.rows, first.promoted, first.drift) == (440, True, {})
    assert first.data is not None and (first.data.time_from, first.data.time_to) == ("2024-01-01", "2024-01-22")
    assert any(line.startswith("the newest day in") and line.endswith("is 2024-01-30") for line in lines)
    fault = refusal(20, {"rows": {"min": 500}, "range": {"a": [0.5, None]}})
    assert "440 rows, at least 500 expected; " in fault and "of 440 rows do not match a >= 0.5" in fault

    write(tmp_path / "rows.parquet", shift=0.3)
    assert "champion version 1 of m was trained: the PSI is " in refusal(30, {"drift": {"max": 0.25}})
    second = submitted(30, {"drift": {"max": 0.25, "columns": ["b"]}}).wait(on_log=None)
    assert second.drift["a"] > 1 and second.drift["b"] == 0 and second.decision is not None
    assert "; largest drift from the training rows of version 1: PSI " in second.decision.sentence
    newest, oldest = mlflow.MlflowClient(uri).search_model_versions("name='m'")
    assert PROFILE_TAG in oldest.tags and PROFILE_TAG in newest.tags
    assert (DRIFT_TAG in oldest.tags, DRIFT_TAG in newest.tags) == (False, True)
