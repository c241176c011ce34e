"""Wide tables: one worker trains with the CPUs of all workers on this host, and its model is that of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.gang import child_processes
from shoal.training.gang.child_processes import on_one_host
from shoal.training.gang.gang import end_gangs
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm.library import LightGBM
from tests.support.boosting_trainings import Losses
from tests.support.two_node_cluster import assert_ended
from tests.support.without_ray import nodes_without_ray

FEATURES = tuple(f"f{i}" for i in range(100))
ROWS = 600


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    columns = {name: rng.standard_normal(ROWS).astype(np.float32) for name in FEATURES}
    columns["y"] = columns["f0"] - columns["f99"] + rng.normal(0, 0.2, ROWS)
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=200)
    return tmp_path / "rows.parquet"


def request(rows: Path, workers: int = 2, threads: int = 1, **fields: Any) -> TrainRequest:
    return TrainRequest.parse(
        {
            "framework": "lightgbm",
            "dataset": {"paths": [str(rows)]},
            "input_cols": FEATURES,
            "label_col": "y",
            "n_estimators": 8,
            "params": {"num_leaves": 7},
            "scaling_config": {"num_workers": workers, "num_cpu_per_worker": threads},
            **fields,
        }
    )


def size(result: TrainResult) -> tuple[int, int, list[int]]:
    return result.num_workers, result.threads_per_worker, [worker.rows for worker in result.workers]


def test_one_worker_trains_with_the_cpus_of_two_nodes_of_a_host_and_restarts_keep_it(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with nodes_without_ray(2):
        alone = train(request(rows, workers=1, threads=2))
        end_gangs()
    with nodes_without_ray(1, 1) as register:
        capsys.readouterr()
        joined = train(request(rows))
        assert [register.free_cpus(node) for node in register.nodes()] == [0, 0], "the CPUs of both nodes are reserved"
        assert "one worker with 2 threads trains in place of 2 workers on this host" in capsys.readouterr().out
        losses = Losses(monkeypatch, 1)
        # The choice is made once: new workers do not ask where they are.
        resumed = train(request(rows, run_config={"checkpoint_every": 4, "max_restarts": 1}))
        assert_ended(losses.lost)
        end_gangs()
    assert size(joined) == size(resumed) == size(alone) == (1, 2, [ROWS])
    assert resumed.restarts == 1
    assert joined.model == resumed.model == alone.model


def test_workers_on_several_hosts_divide_the_rows(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.training.boosting.engine.on_one_host", lambda shape: False)
    with nodes_without_ray(1, 1):
        divided = train(request(rows))
        end_gangs()
    assert size(divided) == (2, 1, [ROWS // 2] * 2)


def test_nodes_are_on_one_host_only_if_this_process_starts_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GangShape(2, 1.0)
    assert not on_one_host(shape)  # such as pods, also if only one is active: a later attempt may find two
    monkeypatch.setattr(child_processes, "has_template", lambda: True)
    child_processes.use_nodes(dict)
    try:
        assert on_one_host(shape)
    finally:
        monkeypatch.setattr(child_processes, "_find_nodes", None)


def test_only_wide_tables_and_only_without_a_wish_of_the_user(rows: Path) -> None:
    def joins(rows_of_table: int = 50_000, **fields: Any) -> bool:
        return LightGBM().joins_workers(request(rows, **fields), UserCode(), rows_of_table)

    assert joins()
    assert not joins(100_001)
    assert not joins(input_cols=FEATURES[:99])
    assert not joins(params={"tree_type": "voting"})
    assert not joins(params={"n_jobs": 1})
