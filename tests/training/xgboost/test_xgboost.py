from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import CapacityError, DataError, InvalidArgumentError, TrainingError
from shoal.training.boosting.engine import train
from shoal.training.boosting.params import UserCode
from shoal.training.boosting.request import TrainRequest, TrainResult
from tests.support.two_node_cluster import COLUMNS, ROWS, TwoNodes, write_rows

pytestmark = pytest.mark.ray


def request(rows: Path, **changes: Any) -> TrainRequest:
    values = {
        "dataset": {"paths": (str(rows),)},
        "input_cols": tuple(COLUMNS),
        "label_col": "y",
        "n_estimators": 10,
        "params": {"max_depth": 3},
    }
    return TrainRequest(**{**values, **changes})


def spec(path: Path) -> dict[str, Any]:
    return {"paths": (str(path),)}


def rmse(result: TrainResult, rows: Path) -> float:
    import xgboost

    table = DataConnector.from_parquet(rows).to_pandas()
    predicted = result.booster().predict(xgboost.DMatrix(table[COLUMNS]))
    return float(np.sqrt(np.mean((predicted - table["y"]) ** 2)))


def test_two_trainings_are_byte_for_byte_the_same(driver: TwoNodes, rows: Path) -> None:
    sampled = request(rows, params={"max_depth": 3, "subsample": 0.5, "colsample_bytree": 0.7})
    first, second = train(sampled), train(sampled)
    assert first.model == second.model
    other = train(sampled.model_copy(update={"run_config": sampled.run_config.model_copy(update={"seed": 1})}))
    assert other.model != first.model


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


def test_it_learns_as_well_as_one_process_does(driver: TwoNodes, rows: Path) -> None:
    import xgboost

    result = train(request(rows, n_estimators=30))
    table = DataConnector.from_parquet(rows).to_pandas()
    alone = xgboost.train({"max_depth": 3}, xgboost.QuantileDMatrix(table[COLUMNS], table["y"]), 30)
    theirs = float(np.sqrt(np.mean((alone.predict(xgboost.DMatrix(table[COLUMNS])) - table["y"]) ** 2)))
    assert rmse(result, rows) == pytest.approx(theirs, rel=0.05)


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


def test_result_and_request_travel_as_json(driver: TwoNodes, rows: Path) -> None:
    asked = request(rows, eval_set={"eval": spec(rows)}, early_stopping_rounds=2, verbose_eval=True)
    assert TrainRequest.model_validate_json(asked.model_dump_json()) == asked
    result = train(asked)
    assert TrainResult.model_validate_json(result.model_dump_json()) == result


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
        assert result.eval_results[name]["rmse"][-1] == pytest.approx(rmse(result, path), rel=1e-3), name


def test_early_stopping_is_agreed_and_remembered(driver: TwoNodes, rows: Path, tmp_path: Path) -> None:
    noise = write_rows(tmp_path / "noise", rows=300, seed=2)
    result = train(
        request(
            rows,
            eval_set={"eval": spec(noise)},
            n_estimators=200,
            early_stopping_rounds=2,
            params={"max_depth": 8, "eta": 0.8},
        )
    )
    values = result.eval_results["eval"]["rmse"]
    assert result.best_iteration == int(np.argmin(values))
    assert result.best_score == pytest.approx(min(values))
    assert result.rounds == len(values) == result.best_iteration + 3
    assert result.booster().best_iteration == result.best_iteration


def test_metrics_are_printed_here_as_often_as_asked(
    driver: TwoNodes, rows: Path, capsys: pytest.CaptureFixture
) -> None:
    train(request(rows, eval_set={"eval": spec(rows)}, verbose_eval=4))
    printed = [line for line in capsys.readouterr().out.splitlines() if "eval-rmse" in line]
    assert [line.split("\t")[0] for line in printed] == ["[0]", "[4]", "[8]", "[9]"]
    train(request(rows, eval_set={"eval": spec(rows)}))
    assert "eval-rmse" not in capsys.readouterr().out


def test_weights_and_margins_count(driver: TwoNodes, rows: Path) -> None:
    plain = train(request(rows))
    assert train(request(rows, weight_col="w")).model != plain.model
    # The margin, 5 everywhere, is what the first tree starts from.
    margined = train(request(rows, base_margin_col="m", n_estimators=50, params={"eta": 1})).booster()
    import xgboost

    table = DataConnector.from_parquet(rows).to_pandas()
    with_margin = xgboost.DMatrix(table[COLUMNS], base_margin=table["m"])
    assert np.mean(np.abs(margined.predict(with_margin) - table["y"])) < 0.5


def test_a_sum_that_only_all_rows_give(driver: TwoNodes, rows: Path) -> None:
    """One leaf, no shrinkage: the model is the mean of every label, each counted once."""
    constant = {"max_depth": 1, "eta": 1, "lambda": 0, "gamma": 1e9, "base_score": 0.0}
    model = train(request(rows, n_estimators=1, params=constant)).booster()
    table = DataConnector.from_parquet(rows).to_pandas()
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


def test_ranking(driver: TwoNodes, tmp_path: Path) -> None:
    """Two workers rank as well as one process, which needs every query's rows on one of them."""
    import xgboost

    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 3)).astype(np.float32)
    ids = np.sort(rng.integers(0, 300, 4000))
    relevance = np.clip(np.round(x[:, 0] + rng.normal(scale=0.3, size=4000) + 1), 0, 4).astype(np.float32)
    table = pa.table({**dict(zip(COLUMNS, x.T, strict=True)), "y": relevance, "q": ids})
    pq.write_table(table, tmp_path / "queries.parquet", row_group_size=700)
    asked = {"dataset": spec(tmp_path), "group_col": "q", "eval_set": {"train": spec(tmp_path)}}
    params = {"objective": "rank:ndcg", "max_depth": 3, "eval_metric": "ndcg@5"}
    result = train(request(tmp_path, **asked, params=params))

    alone: dict[str, Any] = {}
    matrix = xgboost.QuantileDMatrix(x, relevance, qid=ids)
    xgboost.train(params, matrix, 10, evals=[(matrix, "train")], evals_result=alone, verbose_eval=False)
    ours, theirs = (results["train"]["ndcg@5"][-1] for results in (result.eval_results, alone))
    assert ours == pytest.approx(theirs, abs=0.02)
    assert sum(worker.rows for worker in result.workers) == 4000
    with pytest.raises(InvalidArgumentError, match="set group_col to the column"):
        train(request(tmp_path, dataset=spec(tmp_path), params=params))


def test_objectives(driver: TwoNodes, rows: Path) -> None:
    params = {"objective": "multi:softprob", "num_class": 3, "eval_metric": ["mlogloss", "merror"]}
    result = train(request(rows, label_col="k", params=params, eval_set={"eval": spec(rows)}))
    assert set(result.eval_results["eval"]) == {"mlogloss", "merror"}
    assert result.eval_results["eval"]["merror"][-1] < 0.2


# What is refused. None of it may take a gang, or more than a look at the footers, unless it says so.


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"input_cols": ("a", "bb")}, DataError, '"bb"'),
        ({"label_col": "z"}, DataError, '"z"'),
        ({"weight_col": "z"}, DataError, '"z"'),
        ({"params": {"max_depth": "deep"}}, TrainingError, "max_depth"),
        ({"params": {"maxdepth": 3}}, InvalidArgumentError, "max_depth"),
        ({"params": {"nthread": 7}}, InvalidArgumentError, "num_cpu_per_worker"),
        ({"params": {"num_boost_round": 7}}, InvalidArgumentError, "num_boost_round"),
        ({"params": {"device": "cpu"}, "scaling_config": {"use_gpu": True}}, InvalidArgumentError, "use_gpu"),
        ({"scaling_config": {"use_gpu": True}}, CapacityError, "scale_cluster"),
        ({"scaling_config": {"num_workers": 3}}, CapacityError, "scale_cluster"),
        ({"eval_set": {"eval": {"paths": ("/nowhere",)}}}, DataError, "/nowhere"),
    ],
)
def test_refused_before_anything_starts(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, change: dict, error: type[Exception], named: str
) -> None:
    from shoal.training.gang.gang import Gang

    monkeypatch.setattr(Gang, "start", lambda *_, **__: pytest.fail("a gang was started"))
    with pytest.raises(error, match=named):
        train(request(rows, **change))


def test_clamp(driver: TwoNodes, rows: Path) -> None:
    with pytest.warns(UserWarning, match="reduced to 2"):
        result = train(request(rows, scaling_config={"num_workers": 9}, run_config={"clamp": True}))
    assert result.num_workers == 2


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


@pytest.mark.parametrize(
    ("column", "argument", "value"),
    [
        ("y", {}, None),
        ("w", {"weight_col": "w"}, float("inf")),
        pytest.param("y", {}, float("inf"), marks=pytest.mark.long),
        pytest.param("w", {"weight_col": "w"}, None, marks=pytest.mark.long),
    ],
)
def test_nulls_found_while_reading(
    driver: TwoNodes, tmp_path: Path, column: str, argument: dict, value: float | None
) -> None:
    rows = without_statistics(tmp_path, column, [1.0, value])
    with pytest.raises(DataError, match=rf'rows.parquet, row group 0.*"{column}".*row 1.*\[rank \d'):
        train(request(rows, **argument))


def test_labels_that_the_objective_cannot_take(driver: TwoNodes, rows: Path) -> None:
    with pytest.raises(DataError, match=r'part-\d.parquet, row group \d: the label "y" is .*binary:logistic'):
        train(request(rows, params={"objective": "binary:logistic"}))
    # What shoal does not know, XGBoost says itself.
    with pytest.raises(TrainingError, match=r"XGBoost: .*label must be .*rank \d"):
        train(request(rows, label_col="k", params={"objective": "multi:softprob", "num_class": 2}))


def test_not_connected(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InvalidArgumentError, match="not connected"):
        train(request(rows))
