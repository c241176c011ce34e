"""Jobs that train on tables with versions; see `tests.data.tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal import ComputePool, jobs
from shoal.errors import JobFailedError
from shoal.kinds.training.spec import JobSpec
from tests.data.tables.unpacking import cases, unpack
from tests.support.pool_processes import nothing_left


@pytest.mark.processes
def test_a_job_trains_on_the_rows_of_a_table(fresh_home: Path, tmp_path: Path) -> None:
    root = unpack(tmp_path)
    pool = ComputePool("local://tables?max_nodes=1&min_nodes=1&ray=false").up()

    def train(**dataset: Any) -> tuple[int, str | None]:
        spec = {
            "framework": "xgboost",
            "dataset": dataset,
            "input_cols": ["id"],
            "label_col": "x",
            "n_estimators": 1,
            "tracking": None,
            "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1},
            "run_config": {"pool_name": pool.name},
        }
        result = jobs.submit(JobSpec.parse(spec)).wait()
        assert result.data is not None
        return result.rows, result.data.version

    deltas, iceberg = str(root / "delta/deletions"), root / "iceberg/db"
    snapshots = [case for case in cases() if case["table"] == "iceberg/snapshots" and case["count"] == 20]
    release = next(case["read"]["version"] for case in snapshots if isinstance(case["read"].get("version"), int))
    assert train(format="delta", paths=[deltas])[0] == 4697
    assert train(format="delta", paths=[deltas], version="3", stage=True) == (6520, "3")
    assert train(format="iceberg", paths=[str(iceberg / "deletions_vectors")])[0] == 4703
    assert train(format="iceberg", paths=[str(iceberg / "snapshots")], version="release") == (20, str(release))
    with pytest.raises(JobFailedError, match="compact the table first"):
        train(format="iceberg", paths=[str(iceberg / "equality_deletes")])
    pool.down()
    nothing_left()
