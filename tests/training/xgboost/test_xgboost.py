"""XGBoost on two real nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from shoal.errors import DataError, InvalidArgumentError
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from tests.support.boosting_trainings import frame, request, rmse, spec
from tests.support.two_node_cluster import COLUMNS, ROWS, TwoNodes, write_rows

pytestmark = pytest.mark.ray


def test_a_filter_trains_the_model_of_a_filtered_copy(driver: TwoNodes, rows: Path, tmp_path: Path) -> None:
    bound = 0.3
    (tmp_path / "copy").mkdir()
    for path in sorted(rows.glob("*.parquet")):
        with pq.ParquetFile(path) as file, pq.ParquetWriter(tmp_path / "copy" / path.name, file.schema_arrow) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                writer.write_table(table.filter(pc.field(COLUMNS[0]) > bound), row_group_size=len(table))
    copied = train(request(tmp_path / "copy", eval_set={"eval": spec(tmp_path / "copy")}))
    assert 0 < copied.rows < ROWS
    for ingester in ("arrow", "ray"):
        window = {**spec(rows), "filters": [[COLUMNS[0], ">", bound]], "ingester": ingester}
        filtered = train(request(rows, dataset=window, eval_set={"eval": window}))
        assert (filtered.rows, filtered.eval_results["eval"]) == (copied.rows, copied.eval_results["eval"]), ingester
        assert filtered.model == copied.model, ingester


def test_what_it_took_is_told(driver: TwoNodes, rows: Path) -> None:
    result = train(request(rows))
    assert (result.rows, result.num_workers, result.threads_per_worker, result.rounds) == (ROWS, 2, 1, 10)
    assert [(worker.rank, worker.node, worker.rows) for worker in result.workers] == [
        (0, "a-head", ROWS // 2),
        (1, "b", ROWS // 2),
    ]
    for worker in result.workers:
        assert worker.passes == 1
        assert worker.peak_rss_bytes > 50 * 2**20
    assert result.booster().feature_names == COLUMNS


def test_eval_sets_are_reported_by_name_whatever_their_size(driver: TwoNodes, rows: Path, tmp_path: Path) -> None:
    tiny = write_rows(tmp_path / "tiny", rows=1, files=1)
    more = write_rows(tmp_path / "more", rows=500, seed=1)
    result = train(
        request(rows, eval_set={"train": spec(rows), "tiny": spec(tiny), "more": spec(more)}, n_estimators=3)
    )
    assert {name: len(metrics["rmse"]) for name, metrics in result.eval_results.items()} == {
        "train": 3,
        "tiny": 3,
        "more": 3,
    }
    # Metrics are over all the rows, not those of rank 0.
    for name, path in (("train", rows), ("tiny", tiny), ("more", more)):
        assert result.eval_results[name]["rmse"][-1] == pytest.approx(rmse(result.booster(), path), rel=1e-3), name


def test_a_sum_that_only_all_rows_give(driver: TwoNodes, rows: Path) -> None:
    """One leaf, no shrinkage: the model is the mean of every label, each counted once."""
    constant = {"max_depth": 1, "eta": 1, "lambda": 0, "gamma": 1e9, "base_score": 0.0}
    model = train(request(rows, n_estimators=1, params=constant)).booster()
    table = frame(rows)
    assert model.inplace_predict(np.zeros((1, 3), np.float32))[0] == pytest.approx(table["y"].mean(), abs=1e-5)


def test_xgboost_listens_on_loopback_only(driver: TwoNodes, rows: Path) -> None:
    import xgboost

    class Look(xgboost.callback.TrainingCallback):
        def before_training(self, model: Any) -> Any:
            import socket

            from shoal.training.host.own_process import is_loopback, open_listeners

            for listener in open_listeners():
                host = listener.getsockname()[0].removeprefix("::ffff:")
                device = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                assert is_loopback(host) or device.rstrip(b"\0") == b"lo", host
            return model

    train(request(rows, n_estimators=2), user_code=UserCode(callbacks=(Look(),)))


def test_clamp(driver: TwoNodes, rows: Path) -> None:
    with pytest.warns(UserWarning, match="reduced to 2"):
        result = train(request(rows, scaling_config={"num_workers": 9}, run_config={"clamp": True}))
    assert result.num_workers == 2


def test_labels_that_the_objective_cannot_take(driver: TwoNodes, rows: Path) -> None:
    with pytest.raises(DataError, match=r'part-\d.parquet, row group \d: the label "y" is .*binary:logistic'):
        train(request(rows, params={"objective": "binary:logistic"}))


def test_not_connected(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InvalidArgumentError, match="not connected"):
        train(request(rows))
